"""What is rendered from the rows of updates that lack some parameters."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows
from experiments.withheld.groups import GROUPS
from fedmjp.audit.verdict import judge


def withheld_files(folder: Path) -> dict[str, str]:
    """table.csv: the verdict by model and group."""
    rows = read_rows(folder)
    lines = []
    for (model, weights, setting), own in rows.groupby(["model", "weights", "setting"], sort=False):
        verdict = judge(own)
        lines.append(
            {
                "model": model,
                "weights": weights,
                "withheld": setting.removeprefix("without "),
                "answer": str(verdict.answer),
                "attack": verdict.attack,
                "psnr_median": verdict.psnr,
                "gain_mean": verdict.gain.mean,
                "gain_low": verdict.gain.low,
                "gain_high": verdict.gain.high,
                "recovered": verdict.recovered,
                "certified": verdict.certified,
                "count": own["image_id"].nunique(),
            }
        )
    return {"table.csv": csv(pd.DataFrame(lines), 4)}


def withheld_block(folder: Path) -> str:
    """The table as Markdown: a row for each group, a column for each model."""
    table = pd.read_csv(folder / "table.csv").fillna({"attack": ""})
    subjects = list(dict.fromkeys(zip(table["model"], table["weights"], strict=True)))
    by = table.set_index(["model", "weights", "withheld"])
    heads = ["withheld", *(f"{model}, {_short(weights)}" for model, weights in subjects)]
    lines = [[group, *(_cell(by, (*subject, group)) for subject in subjects)] for group in GROUPS]
    return markdown_table(heads, lines)


def _short(weights: str) -> str:
    return "random" if "NOT TRAINED" in weights else f"trained ({weights.removeprefix('shipped ')})"


def _cell(table: pd.DataFrame, key: tuple[str, str, str]) -> str:
    """Verdict, strongest attack, its median PSNR, and images above the bar; "" where the group was not run."""
    if key not in table.index:
        return ""
    row = table.loc[key]
    if not row.attack:
        return str(row.answer)
    return f"{row.answer}: `{row.attack}` {row.psnr_median:.1f} dB, {row.recovered} of {row['count']}"


WITHHELD = Rendering("withheld", withheld_files, {"withheld": withheld_block})
RENDERINGS = (WITHHELD,)
