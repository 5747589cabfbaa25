"""What is rendered from the federations under noise."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, answered, csv, markdown_table, read_rows, spread_table
from experiments.simulate.render import run_files
from fedmjp.records.rows import BASELINES
from fedmjp.report.words import defence_words

BOUNDS = {"psnr_unbiased": "unbiased", "psnr_normal": "normal pixels"}
KEYS = ["defense", "round"]


def noise_files(folder: Path) -> dict[str, str]:
    """table.csv: leakage by defence, number of updates and attack, with the medians of the bounds."""
    table = spread_table(read_rows(folder), [*KEYS, "attack"])
    bounds = pd.read_csv(folder / "bounds.csv").groupby(KEYS)[list(BOUNDS)].median().add_suffix("_median")
    return run_files(folder) | {"table.csv": csv(table.merge(bounds.reset_index(), on=KEYS, how="left"), 4)}


def noise_block(folder: Path) -> str:
    """Medians by defence and number of updates: each attack, the mean image, and the bounds where one is known.

    Beside a median over some of the images alone, their number.
    """
    table = pd.read_csv(folder / "table.csv")
    stated = {bound: words for bound, words in BOUNDS.items() if table[f"{bound}_median"].notna().any()}
    names = [BASELINES[0], *(name for name in table["attack"].unique() if name not in BASELINES)]
    lines = []
    for (defense, number), own in table.groupby(KEYS, sort=False):
        found = [_found(own[own["attack"] == name]) for name in names]
        limits = [f"{own[f'{bound}_median'].iloc[0]:.1f}" for bound in stated]
        lines.append([defence_words(defense), str(number), *found, *limits])
    heads = ["defence", "updates", *(f"`{name}`" for name in names), *(f"bound, {words}" for words in stated.values())]
    return markdown_table(heads, lines)


def _found(own: pd.DataFrame) -> str:
    """The cell of an attack, of one line or none of the table."""
    line = own.iloc[0] if len(own) else None
    if line is None or line["failed"] == line["count"]:
        return "no answer"
    return f"{line['psnr_median']:.1f}{answered(line)}"


NOISE_TABLE = Rendering("noise", noise_files, {"noise": noise_block})
MASKED_TABLE = Rendering("noise_mjp", noise_files, {"noise_mjp": noise_block})
RENDERINGS = (NOISE_TABLE, MASKED_TABLE)
