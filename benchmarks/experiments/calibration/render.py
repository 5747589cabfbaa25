"""Table of the calibration, from its rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_one_seed
from fedmjp.metrics import bootstrap_mean

# Largest difference of the shares of patches vouched for and right that counts as agreement.
TOLERANCE = 0.05
BY = ["model", "weights", "gamma", "attack", "updates"]


def calibration_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Vouched for against right, and certified against right, by model, gamma, attack and number of updates.

    Returns:
        `claims` (images whose answer comes without a diagnosis), `vouched_mean` and `right_mean` (share of an image's
        patches, 0 to 1), `excess_mean` with `excess_low` and `excess_high` (their difference, paired by image),
        `claims_right` (share of the patches vouched for that are right, over all images), `certified` (images),
        `certified_right` (of them, images with every patch above 25 dB), `residual_max` of certified answers, `count`
        (of images).
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
        true_claims = sum(details["vouched_right"] for details in own["details"])
        line |= {"claims_right": true_claims / known.sum() if known.sum() else float("nan")}
        line |= {"claims": int(own["diagnosis"].eq("").sum())}
        line |= {"certified": int(certified.sum())}
        line |= {"certified_right": int((certified & own["patch_recovery"].eq(1.0)).sum())}
        line |= {"residual_max": own["residual"].astype(float)[certified].max(), "count": excess.count}
        lines.append(line)
    return pd.DataFrame(lines)


def calibration_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(calibration_table(read_one_seed(folder)), 4)}


def calibration_block(folder: Path) -> str:
    """The table as Markdown, and how many of its lines are within `TOLERANCE`."""
    table = pd.read_csv(folder / "table.csv")
    lines = []
    for _, row in table.iterrows():
        trained = "random" if "NOT TRAINED" in row.weights else "trained"
        cells = [f"{row.model}, {trained}", f"{row.gamma:g}", f"`{row.attack}`", str(row.updates)]
        points = {f"excess{part}": 100 * row[f"excess{part}"] for part in MEAN}
        right = f"{row.right_mean:.0%}"
        claim = [f"{row.vouched_mean:.0%}", right, interval(points, "excess", 1), _percent(row.claims_right)]
        cells += claim if row.claims else ["no claim", right, "", ""]
        cells += [f"{row.certified_right} of {row.certified}", f"{row['count']:.0f}"]
        lines.append(cells)
    heads = [
        "model",
        "γ",
        "attack",
        "updates",
        "vouched for",
        "right",
        "difference (points)",
        "of those vouched for, right",
    ]
    return markdown_table([*heads, "certified answers that are right", "images"], lines) + "\n\n" + _summary(table)


def _summary(table: pd.DataFrame) -> str:
    """How many lines are within the tolerance, and the widest differences, in one paragraph."""
    claims = table[table["claims"] > 0]
    inside = claims["excess_mean"].abs() <= TOLERANCE
    low, high = 100 * claims["excess_mean"].min(), 100 * claims["excess_mean"].max()
    text = (
        f"Vouched for and right differ by at most {100 * TOLERANCE:.0f} points in {inside.sum()} of the {len(claims)} "
        f"lines in which the attack makes a claim, and by {low:+.1f} to {high:+.1f} points over all of them. Certified "
        f"answers were right in {table['certified_right'].sum()} of {table['certified'].sum()} cases."
    )
    outside = [f"γ = {r.gamma:g}, `{r.attack}` after {r.updates}" for r in claims[~inside].itertuples()]
    return text + (f" Outside: {'; '.join(outside)}." if outside else "")


def _percent(share: float) -> str:
    """A share in words of the table; empty where there is nothing to take a share of."""
    return "" if pd.isna(share) else f"{share:.0%}"


CALIBRATION = Rendering("calibration", calibration_files, {"calibration": calibration_block})
DEIT = Rendering("calibration_deit_s", calibration_files, {"calibration_deit_s": calibration_block})
UNMIX = Rendering("calibration_unmix", calibration_files, {"calibration_unmix": calibration_block})
RENDERINGS = (CALIBRATION, DEIT, UNMIX)
