"""Table of the calibration, from its rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows
from fedmjp.metrics import bootstrap_mean

BY = ["model", "weights", "gamma", "attack", "updates"]


def calibration_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Vouched for against right, and certified against right, by model, gamma, attack and number of updates.

    Returns:
        `vouched_mean` and `right_mean` (share of an image's patches, 0 to 1), `excess_mean` with `excess_low` and
        `excess_high` (their difference, paired by image), `certified` (images), `certified_right` (of them, images with
        every patch above 25 dB), `residual_max` of certified answers, `count` (of images).
    """
    rows = rows.assign(gamma=[p.get("gamma", 0.0) for p in rows["defense_parameters"]], updates=rows["round"])
    lines = []
    for key, own in rows.sort_values(["gamma", "round"], kind="stable").groupby(BY, sort=False):
        known, certified = own["known"].astype(float).fillna(0.0), own["certified"].eq(True)
        excess = bootstrap_mean((known - own["patch_recovery"]).to_numpy())
        line = dict(zip(BY, key, strict=True)) | {
            "vouched_mean": known.mean(),
            "right_mean": own["patch_recovery"].mean(),
        }
        line |= {"excess_mean": excess.mean, "excess_low": excess.low, "excess_high": excess.high}
        line |= {"certified": int(certified.sum())}
        line |= {"certified_right": int((certified & own["patch_recovery"].eq(1.0)).sum())}
        line |= {"residual_max": own["residual"].astype(float)[certified].max(), "count": excess.count}
        lines.append(line)
    return pd.DataFrame(lines)


def calibration_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(calibration_table(read_rows(folder)), 4)}


def calibration_block(folder: Path) -> str:
    """The table as Markdown."""
    lines = []
    for _, row in pd.read_csv(folder / "table.csv").iterrows():
        trained = "random" if "NOT TRAINED" in row.weights else "trained"
        cells = [f"{row.model}, {trained}", f"{row.gamma:g}", f"`{row.attack}`", str(row.updates)]
        cells += [f"{row.vouched_mean:.0%}", f"{row.right_mean:.0%}"]
        points = {f"excess{part}": 100 * row[f"excess{part}"] for part in MEAN}
        cells += [interval(points, "excess", 0), f"{row.certified_right} of {row.certified}", f"{row['count']:.0f}"]
        lines.append(cells)
    heads = ["model", "γ", "attack", "updates", "vouched for", "right", "difference (points)"]
    return markdown_table([*heads, "certified answers that are right", "images"], lines)


CALIBRATION = Rendering("calibration", calibration_files, {"calibration": calibration_block})
DEIT = Rendering("calibration_deit_s", calibration_files, {"calibration_deit_s": calibration_block})
RENDERINGS = (CALIBRATION, DEIT)
