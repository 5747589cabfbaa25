"""What is rendered from the federations of the recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.client_recipes import RECIPES
from experiments.rendering import (
    Rendering,
    answered,
    csv,
    markdown_table,
    read_rows,
    read_run,
    verdict_cell,
    verdict_columns,
)
from fedmjp.audit.verdict import RECOGNISABLE
from fedmjp.records.rows import BASELINES
from fedmjp.report.words import defence_words

BY = ["recipe", "defense"]


def recipe_files(folder: Path) -> dict[str, str]:
    """table.csv: the verdict by recipe and defence; attacks.csv: what each attack found there."""
    rows, names = read_rows(folder), read_run(folder)["recipes"]
    rows["recipe"] = rows["run_id"].map(names)
    lines, found = [], []
    for place, own in rows.groupby(BY, sort=False):
        images = own.groupby(["round", "client", "image"]).ngroups
        named = dict(zip(BY, place, strict=True))
        lines.append(named | verdict_columns(own, images))
        found += [named | line for line in _by_attack(own)]
    return {name: csv(_in_order(table), 4) for name, table in (("table.csv", lines), ("attacks.csv", found))}


def _by_attack(rows: pd.DataFrame) -> list[dict[str, float | int | str]]:
    """Median PSNR (dB), images above the bar, images without an answer and images of each attack, guesses first."""
    lines = []
    for name, own in rows.groupby("attack", sort=False):
        above, failed = int((own["psnr"] > RECOGNISABLE).sum()), int(own["psnr"].isna().sum())
        figures = {"psnr_median": own["psnr"].median(), "above_25": above, "failed": failed, "count": len(own)}
        lines.append({"attack": name} | figures)
    return sorted(lines, key=lambda line: line["attack"] not in BASELINES)


def _in_order(lines: list[dict[str, Any]]) -> pd.DataFrame:
    """Lines by recipe, as `RECIPES` has them."""
    order = {name: place for place, name in enumerate(RECIPES)}
    return pd.DataFrame(lines).sort_values("recipe", key=lambda names: names.map(order), kind="stable")


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


def attack_block(folder: Path) -> str:
    """Each attack as Markdown: a row for each defence and recipe, a column for each attack."""
    table = pd.read_csv(folder / "attacks.csv")
    names = list(dict.fromkeys([*BASELINES, *table["attack"]]))
    lines = []
    for (defense, recipe), own in table.groupby(["defense", "recipe"], sort=False):
        by = own.set_index("attack")
        cells = [_found(by.loc[name]) if name in by.index else "" for name in names]
        lines.append([recipe, defence_words(defense), *cells])
    ordered = sorted(lines, key=lambda line: line[1] != "none")
    return markdown_table(["clients", "defence", *(f"`{name}`" for name in names)], ordered)


def _found(line: pd.Series) -> str:
    """The median, the images that it is over where it is not all, and how many are above the bar where any is."""
    if line["failed"] == line["count"]:
        return "no image"
    above = f", {line['above_25']} of {line['count']}" if line["above_25"] else ""
    return f"{line['psnr_median']:.1f}{answered(line)}{above}"


RECIPE_TABLE = Rendering("recipes", recipe_files, {"recipes": recipe_block, "recipes_attacks": attack_block})
RECIPE_TABLE_LONG = replace(RECIPE_TABLE, folder="recipes_long", blocks={"recipes_long": recipe_block})
RENDERINGS = (RECIPE_TABLE, RECIPE_TABLE_LONG)
