"""What is rendered from the federations of the recipes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.client_recipes import RECIPES
from experiments.rendering import Rendering, csv, markdown_table, read_rows, read_run, verdict_cell, verdict_columns
from fedmjp.report.words import defence_words


def recipe_files(folder: Path) -> dict[str, str]:
    """table.csv: the verdict by recipe and defence."""
    rows, names = read_rows(folder), read_run(folder)["recipes"]
    rows["recipe"] = rows["run_id"].map(names)
    lines = []
    for (recipe, defense), own in rows.groupby(["recipe", "defense"], sort=False):
        images = own.groupby(["round", "client", "image"]).ngroups
        lines.append({"recipe": recipe, "defense": defense} | verdict_columns(own, images))
    order = {name: place for place, name in enumerate(RECIPES)}
    table = pd.DataFrame(lines).sort_values("recipe", key=lambda names: names.map(order), kind="stable")
    return {"table.csv": csv(table, 4)}


def recipe_block(folder: Path) -> str:
    """The table as Markdown: a row for each recipe, a column for each defence."""
    table = pd.read_csv(folder / "table.csv").fillna({"attack": ""})
    defenses = list(table["defense"].unique())
    by = table.set_index(["recipe", "defense"])
    names = list(table["recipe"].unique())
    lines = [[name, *(_cell(by, (name, defense)) for defense in defenses)] for name in names]
    return markdown_table(["clients", *map(defence_words, defenses)], lines)


def _cell(table: pd.DataFrame, key: tuple[str, str]) -> str:
    """The verdict; "" where the cell was not run."""
    return verdict_cell(table.loc[key]) if key in table.index else ""


RECIPE_TABLE = Rendering("recipes", recipe_files, {"recipes": recipe_block})
RENDERINGS = (RECIPE_TABLE,)
