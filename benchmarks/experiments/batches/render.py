"""What is rendered from the rows of small batches over several steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, answered, csv, interval, markdown_table, read_rows, spread_table

PLANE = "plain"  # the setting of rows whose batches are the lines of a plane


def batch_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR by model, schedule of the batches, steps that each image is in, batch size and attack."""
    by = ["model", "weights", "setting", "round", "batch_size", "attack"]
    return {"table.csv": csv(spread_table(read_rows(folder), by), 4)}


def batch_block(folder: Path) -> str:
    """The table as Markdown."""
    lines = []
    for _, row in pd.read_csv(folder / "table.csv").iterrows():
        met = "with different partners" if row.setting == PLANE else row.setting
        cells = [f"{row.batch_size}, {row.model}", f"{row['round']}, {met}", f"`{row.attack}`"]
        numbers = [
            interval(row, "psnr", 1, MEAN),
            f"{row.psnr_median:.1f}{answered(row)}",
            f"{row.psnr_first_decile:.1f}",
        ]
        above = f"{100 * row.psnr_share_recognisable:.0f}%"
        lines.append([*cells, *numbers, above, str(row["count"])])
    heads = ["batches of", "steps with each image", "attack", "PSNR (dB)", "median", "first decile"]
    return markdown_table([*heads, "above 25 dB", "images"], lines)


BATCHES = Rendering("batch_rounds", batch_files, {"batches": batch_block})
RENDERINGS = (BATCHES,)
