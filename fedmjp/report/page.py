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
from PIL import Image

from fedmjp.audit.strongest import image_numbers
from fedmjp.audit.verdict import Verdict
from fedmjp.records.files import write_whole
from fedmjp.records.rows import BASELINES, distinct
from fedmjp.report.grouping import each_group
from fedmjp.report.page_template import PAGE
from fedmjp.report.remarks import Place, diagnoses, not_run, picture_words, titles, verdicts
from fedmjp.report.tables import certified_text, heading, images_text, interval_text, measured, share_text
from fedmjp.report.words import defence_words, grant_words, number_of, setting_words

MAX_IMAGE_ROWS = 200
UPDATE = ("defense", "round", "client")  # what tells a run's updates apart

CAPTIONS = {
    "reconstructions": "One client's image a row: the original (after augmentation, where clients augment), what the "
    "model saw where a defence changes the input, and what the strongest attacks made of the update, the strongest "
    "first, each with its PSNR. Pixels under diagonal lines are those that the attack does not vouch for. An empty "
    "frame says why an attack returned no image. Scores are against the original, so a faithful copy of a shuffled "
    "image scores low, though its patches are known.",
    "leakage_by_round": "Mean PSNR of each attack's reconstructions by federated round, with 95 % bootstrap intervals "
    "over images; points are set slightly apart. Dotted lines need no gradient.",
    "training": "What the defence costs: accuracy (with 95 % intervals over the test images) and loss of the global "
    "model on held-out data after each round. Of the loss only the mean is kept.",
}

MEANINGS = {
    "mse": "Mean squared error per pixel, pixels in [0, 1]. Higher is less leakage.",
    "psnr": "Peak signal-to-noise ratio, the MSE on a logarithmic scale: about 20 dB shows outlines, 25 dB is "
    "recognisable, 30 dB a good copy, 59 dB as exact as 8 bits, 120 dB the largest value given. Lower is less leakage; "
    "compare it with the two guesses, not with zero.",
    "ssim": "Structural similarity, 1 for equal pictures. Lower is less leakage.",
    "fft2d": "Cosine distance of the two-dimensional Fourier spectra, 0 for equal pictures. Higher is less leakage.",
    "fft2d_official": "The same distance as the MJP authors' script computes it, without the complex conjugate, for "
    "comparison with their table. Higher is less leakage.",
    "lpips": "Perceptual distance in the features of a trained network. Higher is less leakage.",
    "patch_recovery": "Share of patches that come above 25 dB in their own place, from 0 to 1. It distinguishes "
    "an image known in parts from one that is poor all over. Lower is less leakage.",
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
    found = verdicts(rows, run)
    headlines = [verdict.headline() for verdict in found.values()]
    page = environment.from_string(PAGE).render(
        run=run,
        opening=_opening(run, rows),
        verdicts=_verdicts(found),
        not_run=not_run(found),
        grants=[grant_words(grants) for grants in _unique(rows["threat_model"])],
        parameters=_parameters(rows),
        metrics=[(heading(name), MEANINGS[name]) for name in measured(summary)],
        table=_table(summary),
        diagnoses=diagnoses(rows),
        training=_training(rounds),
        images=_images(rows),
        images_total=len(rows),
        provenance=_provenance(run),
        skipped=[str(item) for item in (run.get("data") or {}).get("skipped") or []],
        config=_flat(run.get("config") or {}),
        figures={name: _embedded(file, _alt(name, rows)) for name, file in figures.items()},
        captions=CAPTIONS,
        notes=[note for note in notes if note not in headlines],
    )
    write_whole(Path(path), page.encode("utf-8", "backslashreplace"))


def _verdicts(found: Mapping[Place, Verdict]) -> list[dict[str, Any]]:
    return [
        {
            "title": title,
            "answer": str(found[place].answer),
            "kind": str(found[place].answer).split()[-1],  # leaks, partly, shown, tested
            "reason": found[place].reason(),
            "details": found[place].summary(),
        }
        for place, title in titles(found).items()
    ]


def _alt(name: str, rows: pd.DataFrame) -> str:
    """What a picture shows, for those who cannot see it."""
    if name == "reconstructions":
        return f"Photographs beside their reconstructions. {picture_words(rows)}."
    if name == "leakage_by_round":
        first, last = rows["round"].min(), rows["round"].max()
        span = f"in round {first}" if first == last else f"from round {first} to {last}"
        return f"Mean PSNR of each attack {span}, one panel a defence. {picture_words(rows)}."
    if name == "training":
        return f"Test accuracy and loss by round: {'; '.join(map(defence_words, rows['defense'].unique()))}."
    return name.replace("_", " ")


def _opening(run: Mapping[str, Any], rows: pd.DataFrame) -> str:
    if rows.empty:
        return "This run has no results yet."
    attacks = [name for name in rows["attack"].unique() if name not in BASELINES]
    clients, images = (1 + image_numbers(rows, [*UPDATE, *more]).max() for more in ((), ("image",)))
    updates = {"gradient": "the gradient of one batch", "weights": "the change of its weights after local training"}
    sent = " or ".join(updates.get(name, name) for name in rows["update"].unique())
    return (
        f"Clients trained {_listed(rows['model'])} on {_listed(rows['dataset'])} and each sent the server {sent} "
        f"(batch size {_listed(rows['batch_size'])}, local steps {_listed(rows['local_steps'])}). A curious server "
        f"then tried to reconstruct the clients' images from what it received: {number_of(len(attacks), 'attack')} "
        f"({', '.join(attacks) or 'none'}) against {_defences(rows)}, {number_of(clients, 'client update')} with "
        f"{number_of(images, 'image')} over {number_of(rows['round'].nunique(), 'round')}."
    )


def _defences(rows: pd.DataFrame) -> str:
    names = [defence_words(label) for label in rows["defense"].unique()]
    return f"{number_of(len(names), 'defence')} ({'; '.join(names)})"


def _unique(column: pd.Series) -> list[Any]:
    """Values in order of first appearance; they may be lists or dictionaries."""
    return list({str(value): value for value in distinct(column.astype(object))}.values())


def _parameters(rows: pd.DataFrame) -> list[dict[str, str]]:
    """The settings of each attack, in words."""
    attacked = rows.loc[~rows["attack"].isin(BASELINES), ["attack", "attack_parameters"]]
    return [
        {"attack": name, "settings": "; or ".join(map(setting_words, _unique(group["attack_parameters"]))) or "none"}
        for (name,), group in each_group(attacked, ["attack"])
    ]


def _table(summary: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a model, block and defence, with its lines."""
    names = measured(summary)
    groups = []
    for (model, block, defense), group in summary.groupby(["model", "block", "defense"], sort=False):
        lines = [
            {
                "attack": line["attack"],
                "baseline": line["attack"] in BASELINES,
                "images": images_text(line),
                "cells": [interval_text(line, name, "\n") for name in names],
                "psnr_median": "–" if np.isnan(line["psnr_median"]) else f"{line['psnr_median']:.2f}",
                "vouched": share_text(line),
                "certified": certified_text(line),
                "seconds": "–" if np.isnan(line["seconds_mean"]) else f"{line['seconds_mean']:.3g}",
            }
            for line in group.to_dict("records")
        ]
        groups.append({"title": f"{defence_words(defense)} ({model}, {block} block)", "lines": lines})
    return groups


def _training(rounds: pd.DataFrame) -> list[dict[str, Any]]:
    if rounds.empty:
        return []
    last = rounds.loc[rounds.groupby("defense", sort=False)["round"].idxmax()]
    return last.assign(defense=last["defense"].map(defence_words)).to_dict("records")


def _images(rows: pd.DataFrame) -> list[dict[str, Any]]:
    order = rows["psnr"].reset_index(drop=True).sort_values(ascending=False, kind="stable").index
    worst = rows.iloc[order[:MAX_IMAGE_ROWS]]
    worst = worst.assign(defense=worst["defense"].astype(object).map(defence_words))
    return worst.astype(object).where(worst.notna(), None).to_dict("records")


def _provenance(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    data = run.get("data") or {}
    facts = [(name.replace("_", " ").capitalize(), run.get(name)) for name in ("run_id", "commit", "device", "seed")]
    facts += [("Data", data.get("name")), ("Origin of the data", data.get("provenance"))]
    facts += [("Partition", data["partition"])] if "partition" in data else []
    facts += [(f"Weights of {model}", origin) for model, origin in (run.get("weights") or {}).items()]
    facts += [(f"Version of {name}", version) for name, version in (run.get("versions") or {}).items()]
    return [(name, "not recorded" if value in (None, "") else str(value)) for name, value in facts]


def _flat(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        return [
            pair for key, value in config.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, str(config))] if prefix else []


def _embedded(file: Path, alt: str) -> dict[str, Any]:
    content = Path(file).read_bytes()
    pixels, dpi = _width_and_dpi(file)
    source = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    # 1.2 times the printed size: letters of 8 pt come out like the text around them.
    return {"source": source, "width": round(1.2 * 96 * pixels / dpi), "alt": alt}


def _listed(column: pd.Series) -> str:
    return ", ".join(map(str, column.unique()))


def _width_and_dpi(file: Path) -> tuple[int, float]:
    with Image.open(file) as picture:
        return picture.width, float(picture.info["dpi"][0])
