"""The report page: one HTML file that explains itself, with every picture inside and nothing fetched from anywhere.

What the page says in words is decided here, from the summary; the template only lays it out.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined

from fedmjp.records.rows import BASELINES
from fedmjp.report.figures import DPI
from fedmjp.report.page_template import PAGE
from fedmjp.report.tables import heading, images_text, interval_text, measured

MAX_IMAGE_ROWS = 200

CAPTIONS = {
    "reconstructions": "Each row is one client's image: the original, what the model saw after the defence, and what "
    "each attack made of the gradient, with its PSNR underneath. Empty frames say why an attack returned no image. "
    "Scores are against the original, so a faithful copy of a shuffled image scores low, though its patches are known.",
    "leakage_by_round": "Mean PSNR of each attack's reconstructions against the federated round, with 95 % bootstrap "
    "intervals over images; points are set slightly apart for legibility. Dotted lines need no gradient: an attack at "
    "or below them shows no leak.",
    "training": "What the defence costs: accuracy and loss of the global model on held-out data after each round.",
}

MEANINGS = {
    "mse": "Mean squared error per pixel, pixels in [0, 1]. Higher is more private.",
    "psnr": "Peak signal-to-noise ratio, the MSE on a logarithmic scale: about 20 dB is recognisable, 30 dB a good "
    "copy, 60 dB all but exact, 120 dB the most it can say. Lower is more private; judge it against the two baselines, "
    "not against zero.",
    "ssim": "Structural similarity, 1 for equal pictures. Lower is more private.",
    "fft2d": "Cosine distance of the two-dimensional Fourier spectra, 0 for equal pictures. Higher is more private.",
    "fft2d_official": "The same distance as the MJP authors' script computes it, without the complex conjugate, for "
    "comparison with their table. Higher is more private.",
    "lpips": "Perceptual distance in the features of a trained network. Higher is more private.",
    "patch_recovery": "Share of patches recovered in their own place at more than 25 dB each, from 0 to 1. It tells an "
    "image recovered in parts from one recovered badly all over. Lower is more private.",
}


def write_page(
    path: str | os.PathLike[str],
    *,
    run: Mapping[str, Any],
    summary: pd.DataFrame,
    rounds: pd.DataFrame,
    rows: pd.DataFrame,
    figures: Mapping[str, Path],
    notes: list[str],
) -> None:
    """Write the report of one run as a self-contained HTML page.

    Args:
        path: the .html file to write.
        run: content of run.json: run_id, command, config, versions, commit, device, seed, weights (model to
            provenance), data (name, provenance, skipped) and finished. Absent keys are shown as "not recorded".
        summary: what `tables.summarise` gives.
        rounds: columns `defense`, `round`, `loss`, `accuracy` (fraction), `seconds`; may be empty.
        rows: the results rows the summary was made from.
        figures: name to PNG file; the names in `CAPTIONS` have a place and a caption, others go at the end.
        notes: remarks for the reader, shown under the verdict.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    run = dict.fromkeys(("run_id", "command", "commit", "finished")) | dict(run)
    page = environment.from_string(PAGE).render(
        run=run,
        opening=_opening(run, rows),
        verdicts=verdicts(summary),
        threat_model=_threat_model(rows),
        metrics=[(heading(name), MEANINGS[name]) for name in measured(summary)],
        table=_table(summary),
        diagnoses=_diagnoses(rows),
        training=_training(rounds),
        images=_images(rows),
        images_total=len(rows),
        provenance=_provenance(run),
        skipped=[str(item) for item in (run.get("data") or {}).get("skipped") or []],
        config=_flat(run.get("config") or {}),
        figures={name: _embedded(file) for name, file in figures.items()},
        captions=CAPTIONS,
        notes=notes,
    )
    Path(path).write_text(page, encoding="utf-8")


def verdicts(summary: pd.DataFrame) -> list[dict[str, str]]:
    """The strongest attack on each defence (highest mean PSNR) and in words whether it beats the baselines.

    Returns:
        one dictionary per (model, block, defense): `setting`, `defense`, `attack` ("" if none returned an image),
        `psnr`, `level` ("leak", "unclear" or "none") and `words`.
    """
    answers = []
    several = summary["model"].nunique() > 1 or summary["block"].nunique() > 1
    for (model, block, defense), group in summary.groupby(["model", "block", "defense"], sort=False):
        answer = {"defense": str(defense), "setting": f"{model}, {block}" if several else ""}
        is_baseline = group["attack"].isin(BASELINES)
        attacks = group[~is_baseline & group["psnr_mean"].notna()]
        if attacks.empty:
            words = "No attack returned an image; the diagnoses below say why."
            answers.append(answer | {"attack": "", "psnr": "–", "level": "none", "words": words})
            continue
        best = attacks.loc[attacks["psnr_mean"].idxmax()].to_dict()
        level, comparison = _compared(best, group[is_baseline & group["psnr_mean"].notna()])
        words = f"{comparison} {_fidelity(best['psnr_mean'])}"
        if best["failed"]:
            words += f" It returned an image in {images_text(best)} cases."
        psnr = interval_text(best, "psnr", "\n")
        answers.append(answer | {"attack": best["attack"], "psnr": psnr, "level": level, "words": words})
    return answers


def _compared(best: Mapping[str, Any], baselines: pd.DataFrame) -> tuple[str, str]:
    if baselines.empty:
        return "unclear", "The gradient-free baselines were not run, so there is nothing to judge it against."
    bar = baselines.loc[baselines["psnr_mean"].idxmax()]
    against = "both gradient-free baselines" if len(baselines) == 2 else "the one gradient-free baseline that was run"
    margin = best["psnr_mean"] - bar["psnr_mean"]
    top = f"the better one, {bar['attack']}, has {bar['psnr_mean']:.1f} dB"
    if margin <= 0:
        return "none", f"Does not beat the gradient-free baselines ({top}): it shows no leak."
    if max(bar["psnr_high"], bar["psnr_mean"]) < min(best["psnr_low"], best["psnr_mean"]):
        return "leak", f"Beats {against}, by {margin:.1f} dB ({top}): the gradient leaks."
    return "unclear", f"Is above {against} by only {margin:.1f} dB and the intervals overlap ({top}): undecided."


def _fidelity(psnr: float) -> str:
    steps = ((60, "All but exact."), (30, "A good copy."), (20, "Recognisable."))
    return next((words for bar, words in steps if psnr >= bar), "Below 20 dB: on average hardly recognisable.")


def _opening(run: Mapping[str, Any], rows: pd.DataFrame) -> str:
    if rows.empty:
        return "This run has no results yet."
    attacks = [name for name in rows["attack"].unique() if name not in BASELINES]
    clients = rows.groupby(["defense", "round", "client"]).ngroups
    images = rows.groupby(["defense", "round", "client", "image"]).ngroups
    updates = {"gradient": "the gradient of one batch", "weights": "the change of its weights after local training"}
    sent = " or ".join(updates.get(name, name) for name in rows["update"].unique())
    return (
        f"Clients trained {_listed(rows['model'])} on {_listed(rows['dataset'])} and each sent the server {sent} "
        f"(batch size {_listed(rows['batch_size'])}, local steps {_listed(rows['local_steps'])}). A curious server "
        f"then tried to reconstruct the clients' images from what it received: {_number(len(attacks), 'attack')} "
        f"({', '.join(attacks) or 'none'}) against {_number(rows['defense'].nunique(), 'defence')} "
        f"({_listed(rows['defense'])}), {_number(clients, 'client update')} with {_number(images, 'image')} over "
        f"{_number(rows['round'].nunique(), 'round')}."
    )


def _threat_model(rows: pd.DataFrame) -> list[dict[str, Any]]:
    attacks = []
    for name, group in rows.groupby("attack", sort=False):
        grants = dict.fromkeys(str(grant) for grants in group["threat_model"] for grant in grants)
        settings = (", ".join(f"{key} = {value}" for key, value in p.items()) for p in group["attack_parameters"])
        attacks.append({"attack": name, "grants": list(grants), "parameters": "; or ".join(dict.fromkeys(settings))})
    return attacks


def _table(summary: pd.DataFrame) -> list[dict[str, Any]]:
    names = measured(summary)
    lines: list[dict[str, Any]] = []
    before = None
    for line in summary.to_dict("records"):
        key = (line["model"], line["block"], line["defense"])
        lines.append(
            {
                "first": key != before,
                "group": f"{line['defense']} ({line['model']}, {line['block']} block)",
                "attack": line["attack"],
                "baseline": line["attack"] in BASELINES,
                "images": images_text(line),
                "cells": [interval_text(line, name, "\n") for name in names],
                "psnr_median": "–" if np.isnan(line["psnr_median"]) else f"{line['psnr_median']:.2f}",
                "seconds": "–" if np.isnan(line["seconds_mean"]) else f"{line['seconds_mean']:.3g}",
            }
        )
        before = key
    return lines


def _diagnoses(rows: pd.DataFrame) -> list[dict[str, Any]]:
    diagnosed = rows[rows["diagnosis"].fillna("") != ""]
    counts = diagnosed.groupby(["defense", "attack", "diagnosis"], sort=False).size()
    totals = rows.groupby(["defense", "attack"]).size()
    return [
        {"defense": d, "attack": a, "diagnosis": text, "count": f"{n} of {totals[d, a]}"}
        for (d, a, text), n in counts.items()
    ]


def _training(rounds: pd.DataFrame) -> list[dict[str, Any]]:
    if rounds.empty:
        return []
    return rounds.loc[rounds.groupby("defense", sort=False)["round"].idxmax()].to_dict("records")


def _images(rows: pd.DataFrame) -> list[dict[str, Any]]:
    worst = rows.sort_values("psnr", ascending=False, kind="stable").head(MAX_IMAGE_ROWS)
    return worst.astype(object).where(worst.notna(), None).to_dict("records")


def _provenance(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    data = run.get("data") or {}
    facts = [(name.replace("_", " ").capitalize(), run.get(name)) for name in ("run_id", "commit", "device", "seed")]
    facts += [("Data", data.get("name")), ("Origin of the data", data.get("provenance"))]
    facts += [(f"Weights of {model}", origin) for model, origin in (run.get("weights") or {}).items()]
    facts += [(f"Version of {name}", version) for name, version in (run.get("versions") or {}).items()]
    return [(name, "not recorded" if value in (None, "") else str(value)) for name, value in facts]


def _flat(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        return [
            pair for key, value in config.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, str(config))] if prefix else []


def _embedded(file: Path) -> dict[str, Any]:
    content = Path(file).read_bytes()
    pixels = int.from_bytes(content[16:20], "big")  # the width in a PNG's header
    source = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    # 1.2 times the printed size: letters of 8 pt come out like the text around them.
    return {"source": source, "width": round(1.2 * 96 * pixels / DPI)}


def _listed(column: pd.Series) -> str:
    return ", ".join(map(str, column.unique()))


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
