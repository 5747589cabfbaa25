"""What is rendered from the federations under noise."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows, spread_table
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
    """Medians by defence and number of updates: each attack, the mean image, and the bounds where one is known."""
    table = pd.read_csv(folder / "table.csv")
    stated = {bound: words for bound, words in BOUNDS.items() if table[f"{bound}_median"].notna().any()}
    names = [BASELINES[0], *(name for name in table["attack"].unique() if name not in BASELINES)]
    lines = []
    for (defense, number), own in table.groupby(KEYS, sort=False):
        medians = own.set_index("attack")["psnr_median"]
        found = [f"{medians[name]:.1f}" if pd.notna(medians.get(name)) else "no answer" for name in names]
        limits = [f"{own[f'{bound}_median'].iloc[0]:.1f}" for bound in stated]
        lines.append([defence_words(defense), str(number), *found, *limits])
    heads = ["defence", "updates", *(f"`{name}`" for name in names), *(f"bound, {words}" for words in stated.values())]
    return markdown_table(heads, lines)


NOISE_TABLE = Rendering("noise", noise_files, {"noise": noise_block})
MASKED_TABLE = Rendering("noise_mjp", noise_files, {"noise_mjp": noise_block})
RENDERINGS = (NOISE_TABLE, MASKED_TABLE)
