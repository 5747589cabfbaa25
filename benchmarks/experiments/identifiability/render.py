"""What is rendered from the rows of what updates of few numbers determine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows
from fedmjp.records.rows import PROVENANCE, Schema

BY = ["model", "weights", "withheld", "sent", "values"]
SCHEMA = Schema(
    keys=(*PROVENANCE, "withheld", "image_id", "sent", "values", "identifiable", "psnr", "seconds"),
    identity=("dataset", "model", "weights", "withheld", "seed", "image_id"),
)


def identifiability_files(folder: Path) -> dict[str, str]:
    """table.csv: combinations of pixels that are determined, and the bound of PSNR, by model and group."""
    grouped = read_rows(folder, SCHEMA).groupby(BY, sort=False)
    table = {
        f"{name}_{statistic}": getattr(grouped[name], statistic)()
        for name in ("identifiable", "psnr")
        for statistic in ("median", "min", "max")
    }
    table |= {"count": grouped.size()}
    return {"table.csv": csv(pd.DataFrame(table).reset_index(), 4)}


def identifiability_block(folder: Path) -> str:
    """The table as Markdown."""
    heads = [
        "model",
        "withheld",
        "numbers sent",
        "numbers of the image",
        "of these identifiable at 25 dB, median",
        "PSNR at the bound, median (dB)",
        "images",
    ]
    lines = [
        [
            row.model + (", longer training" if ".long." in row.weights else _origin(row.weights)),
            row.withheld,
            f"{row.sent:,}",
            f"{row['values']:,}",
            f"{row.identifiable_median:,.0f} ({row.identifiable_min:,.0f} to {row.identifiable_max:,.0f})",
            f"{row.psnr_median:.1f} ({row.psnr_min:.1f} to {row.psnr_max:.1f})",
            str(row["count"]),
        ]
        for _, row in pd.read_csv(folder / "table.csv").iterrows()
    ]
    return markdown_table(heads, lines)


def _origin(weights: str) -> str:
    return ", random" if "NOT TRAINED" in weights else ", trained"


IDENTIFIABILITY = Rendering("identifiability", identifiability_files, {"identifiability": identifiability_block})
RENDERINGS = (IDENTIFIABILITY,)
