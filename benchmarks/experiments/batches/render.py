"""What is rendered from the rows of small batches over several steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows, spread_table


def batch_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR by model, batch size and attack."""
    return {"table.csv": csv(spread_table(read_rows(folder), ["model", "weights", "batch_size", "attack"]), 4)}


def batch_block(folder: Path) -> str:
    """The table as Markdown."""
    lines = []
    for _, row in pd.read_csv(folder / "table.csv").iterrows():
        cells = [f"{row.batch_size}, {row.model}", f"`{row.attack}`", interval(row, "psnr", 1, MEAN)]
        lines.append([*cells, f"{row.psnr_median:.1f}", f"{row.psnr_first_decile:.1f}", str(row["count"])])
    return markdown_table(["batches of", "attack", "PSNR (dB)", "median", "first decile", "images"], lines)


BATCHES = Rendering("batch_rounds", batch_files, {"batches": batch_block})
RENDERINGS = (BATCHES,)
