"""What is rendered from the rows of messages of low precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.message_precision.options import PRECISIONS
from experiments.rendering import Rendering, answered, csv, markdown_table, read_one_seed
from fedmjp.records.rows import BASELINES

# Ways in which an attack takes the message: as it comes, and with what its precision says of every entry.
PLAIN, KNOWN = "plain", "errors known"
# The error that no unbiased estimate from the equations goes below, and that none at all does where pixels are normal
# (`bounds`).
BOUND, NORMAL = "bound", "bound of normal pixels"
# An attack that refines another one's answer is compared with that one's plain solve.
REFINES = {"gauss_newton": "patch_embedding"}
RESAMPLES = 2000


def table_files(folder: Path) -> dict[str, str]:
    """table.csv: medians by model, precision, attack and way, and what is vouched for and certified."""
    rows = read_one_seed(folder)
    rows = rows[~rows["attack"].isin(BASELINES)].copy()
    rows["psnr"] = rows["psnr"].astype(float)
    gains = _gains(rows)
    lines = []
    for (model, weights, setting, attack), own in rows.groupby(["model", "weights", "setting", "attack"], sort=False):
        precision, _, way = setting.rpartition(", ")
        gain = gains.get((model, weights, precision, attack)) if way == KNOWN else None
        middle = _median(own["psnr"].to_numpy())
        lines.append(
            {
                "model": model,
                "weights": weights,
                "message": precision,
                "attack": attack,
                "way": way,
                "psnr_median": middle[0],
                "psnr_low": middle[1],
                "psnr_high": middle[2],
                "difference_median": np.nan if gain is None else gain[0],
                "difference_low": np.nan if gain is None else gain[1],
                "difference_high": np.nan if gain is None else gain[2],
                "vouched_mean": own["known"].fillna(0).astype(float).mean(),
                "right_mean": own["patch_recovery"].fillna(0).astype(float).mean(),
                "certified": int(_certified(own).sum()),
                "certified_right": int((_certified(own) & (own["patch_recovery"] == 1)).sum()),
                "count": len(own),
                "failed": int(own["psnr"].isna().sum()),
            }
        )
    return {"table.csv": csv(pd.DataFrame(lines), 4)}


def _certified(rows: pd.DataFrame) -> pd.Series:
    return rows["certified"].map(lambda value: value is True or value == 1)


def _gains(rows: pd.DataFrame) -> dict[tuple[str, str, str, str], tuple[float, float, float]]:
    """Median of the paired differences that the known errors make, by model, weights, precision and attack."""
    message = rows["setting"].str.rpartition(", ")
    named = rows.assign(message=message[0], way=message[2])
    for refining, refined in REFINES.items():
        plain = named[(named["attack"] == refined) & (named["way"] == PLAIN)]
        named = pd.concat([named, plain.assign(attack=refining)])
    wide = named.pivot_table(
        index=["model", "weights", "message", "attack", "image_id"], columns="way", values="psnr", aggfunc="first"
    )
    if KNOWN not in wide or PLAIN not in wide:
        return {}
    paired = (wide[KNOWN] - wide[PLAIN]).dropna()
    keys = ["model", "weights", "message", "attack"]
    return {key: _median(own.to_numpy()) for key, own in paired.groupby(level=keys)}


def _median(values: np.ndarray) -> tuple[float, float, float]:
    """Median with its 95 % percentile bootstrap interval (Efron 1979), over images."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return float("nan"), float("nan"), float("nan")
    draws = np.random.default_rng(0).integers(0, len(finite), size=(RESAMPLES, len(finite)))
    low, high = np.quantile(np.median(finite[draws], axis=1), [0.025, 0.975])
    return float(np.median(finite)), float(low), float(high)


def table_block(folder: Path) -> str:
    """The table as Markdown: a row for each model, attack and precision; without and with known errors."""
    table = pd.read_csv(folder / "table.csv")
    order = {name: place for place, name in enumerate(PRECISIONS)}
    lines = []
    for (model, weights, attack), own in table.groupby(["model", "weights", "attack"], sort=False):
        for precision, pair in sorted(own.groupby("message"), key=lambda item: order[item[0]]):
            ways = {row.way: row for row in pair.itertuples()}
            plain, known, bound, normal = (ways.get(way) for way in (PLAIN, KNOWN, BOUND, NORMAL))
            best = known or plain
            subject = f"{model}, {'random' if 'NOT TRAINED' in weights else 'trained'}"
            cells = [f"`{attack}`, {subject}", precision, _cell(plain, "psnr"), _cell(known, "psnr")]
            cells += [
                _cell(known, "difference", "+"),
                _cell(bound, "psnr"),
                _cell(normal, "psnr"),
                f"{best.vouched_mean:.0%} / {best.right_mean:.0%}",
            ]
            lines.append([*cells, f"{best.certified} ({best.certified_right})", str(best.count)])
    heads = [
        "attack, model",
        "message",
        "plain",
        "errors known",
        "difference",
        "bound, unbiased",
        "bound, normal pixels",
        "vouched / right",
        "certified",
        "images",
    ]
    return markdown_table(heads, lines)


def _cell(row, name: str, sign: str = "") -> str:
    """Median [95 % interval], and of how many images where not all were answered; "" without one."""
    if row is None or np.isnan(getattr(row, f"{name}_median")):
        return ""
    middle, low, high = (format(getattr(row, f"{name}_{part}"), f"{sign}.1f") for part in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]{answered(row._asdict())}"


MESSAGE_PRECISION = Rendering("message_precision", table_files, {"message_precision": table_block})
COMPRESSION = Rendering("compression", table_files, {"compression": table_block})
RENDERINGS = (MESSAGE_PRECISION, COMPRESSION)
