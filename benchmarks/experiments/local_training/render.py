"""What is rendered from the rows of clients that train locally."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, answered, csv, markdown_table, read_rows, spread_table
from fedmjp.records.rows import BASELINES

BY = ["model", "weights", "setting", "attack"]


def local_training_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR, what is vouched for and what is certified, by model, situation and attack."""
    rows = read_rows(folder)
    rows = rows[~rows["attack"].isin(BASELINES)].copy()
    rows["psnr"] = rows["psnr"].astype(float)
    table = spread_table(rows, BY).set_index(BY)
    grouped = rows.groupby(BY, sort=False)
    table["vouched_mean"] = grouped["known"].apply(lambda known: known.fillna(0).astype(float).mean())
    table["certified"] = grouped["certified"].apply(lambda certified: int(certified.eq(True).sum()))
    return {"table.csv": csv(table.reset_index(), 4)}


def local_training_block(folder: Path) -> str:
    """The table as Markdown: a row for each situation and attack, by model."""
    table = pd.read_csv(folder / "table.csv")
    heads = ["model", "client", "attack", "median (dB)", "first decile (dB)", "above 25 dB", "vouched for", "certified"]
    lines = []
    for _, row in table.iterrows():
        count = int(row["count"])
        subject = f"{row.model}, {'random' if 'NOT TRAINED' in row.weights else 'trained'}"
        figures = [f"{row.psnr_median:.1f}{answered(row)}", f"{row.psnr_first_decile:.1f}"]
        figures = ["", ""] if pd.isna(row.psnr_median) else figures
        good = f"{round(row.psnr_share_recognisable * count)} of {count}"
        lines.append([subject, row.setting, f"`{row.attack}`", *figures, good, f"{row.vouched_mean:.0%}"])
        lines[-1].append(f"{row.certified} of {count}")
    return markdown_table(heads, lines)


LOCAL_TRAINING = Rendering("local_training", local_training_files, {"local_training": local_training_block})
RENDERINGS = (LOCAL_TRAINING,)
