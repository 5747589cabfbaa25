"""What is rendered from the rows of updates that lack some parameters."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows, verdict_cell, verdict_columns
from experiments.withheld.groups import GROUPS


def withheld_files(folder: Path) -> dict[str, str]:
    """table.csv: the verdict by model and group."""
    rows = read_rows(folder)
    lines = []
    for (model, weights, setting), own in rows.groupby(["model", "weights", "setting"], sort=False):
        line = {"model": model, "weights": weights, "withheld": setting.removeprefix("without ")}
        lines.append(line | verdict_columns(own, own["image_id"].nunique()))
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
    """The verdict; "" where the group was not run."""
    return verdict_cell(table.loc[key]) if key in table.index else ""


WITHHELD = Rendering("withheld", withheld_files, {"withheld": withheld_block})
RENDERINGS = (WITHHELD,)
