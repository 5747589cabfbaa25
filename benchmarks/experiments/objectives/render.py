"""What is rendered from the rows of updates under each objective."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, answered, csv, interval, markdown_table, read_rows, spread_table
from fedmjp.audit.verdict import judge
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import BASELINES

BY = ["objective", "model", "weights", "round"]
# Largest difference of a probability between the fixed point and the image found, where they agree.
SAME = 1e-3
NUMBERS = ["psnr_mean", "psnr_low", "psnr_high", "psnr_median", "count", "failed"]


def leak_files(folder: Path) -> dict[str, str]:
    """table.csv: a line for each objective, model, number of updates and attack."""
    rows, lines = read_rows(folder), []
    for key, own in rows.groupby(BY, sort=False):
        guesses = own[own["attack"].isin(BASELINES)]
        for attack, found in own[~own["attack"].isin(BASELINES)].groupby("attack", sort=False):
            verdict = judge(pd.concat([guesses, found]))
            spread = spread_table(found, ["attack"])
            share = bootstrap_mean(found["patch_recovery"].to_numpy())
            lines.append(
                dict(zip(BY, key, strict=True))
                | {"attack": attack, "answer": str(verdict.answer), "recovered": verdict.recovered}
                | (spread.iloc[0][NUMBERS].to_dict() if len(spread) else {})
                | {
                    "patch_recovery_mean": share.mean,
                    "patch_recovery_low": share.low,
                    "patch_recovery_high": share.high,
                }
                | {"closed_form": _closed_form(found["details"])}
                | {"diagnosis": _most_common(found["diagnosis"])}
            )
    return {"table.csv": csv(pd.DataFrame(lines).rename(columns={"round": "updates"}), 4)}


def leak_block(folder: Path) -> str:
    """The table as Markdown."""
    heads = ["objective", "model, weights", "attack", "updates", "images", "PSNR (dB), median", "mean", "above 25 dB"]
    heads += ["patches above 25 dB", "fixed point agrees", "verdict"]
    return markdown_table(heads, [_cells(row) for _, row in pd.read_csv(folder / "table.csv").iterrows()])


def _cells(row: pd.Series) -> list[str]:
    weights = "random" if "NOT TRAINED" in row["weights"] else f"trained ({row['weights'].removeprefix('shipped ')})"
    number = pd.notna(row["psnr_median"])
    numbers = [f"{row['psnr_median']:.1f}{answered(row)}", interval(row, "psnr", 1)] if number else ["", ""]
    share = {f"share{end}": 100 * row[f"patch_recovery{end}"] for end in ("_mean", "_low", "_high")}
    return [
        f"`{row['objective']}`",
        f"`{row['model']}`, {weights}",
        f"`{row['attack']}`",
        str(row["updates"]),
        str(int(row["count"])),
        *numbers,
        str(row["recovered"]),
        f"{interval(share, 'share', 0)} %",
        f"{row['closed_form']:.0f}" if pd.notna(row["closed_form"]) else "",
        str(row["answer"]),
    ]


def _closed_form(details: pd.Series) -> float:
    """Images whose predictions the head's fixed point gives as well; NaN for attacks that have none."""
    differences = [own["fixed_point"] for own in details if "fixed_point" in own]
    return sum(d < SAME for d in differences) if differences else float("nan")


def _most_common(diagnoses: pd.Series) -> str:
    """The diagnosis that most rows have; "" where most have none."""
    return str(diagnoses.mode().iloc[0])


OBJECTIVES_LEAK = Rendering("objectives_leak", leak_files, {"objectives_leak": leak_block})
RENDERINGS = (OBJECTIVES_LEAK,)
