"""What is rendered from the rows of patches up to their order."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_one_seed
from fedmjp.records.rows import PROVENANCE, Schema

BY = ["model", "weights", "gamma", "withheld", "attack", "solver"]
RECOGNISABLE = 20.0
SCHEMA = Schema(
    keys=(
        *PROVENANCE,
        "attack",
        "solver",
        "gamma",
        "withheld",
        "image_id",
        "hidden",
        "tokens_found",
        "right",
        "psnr_unordered",
        "psnr",
        "seconds",
        "diagnosis",
    ),
    identity=("dataset", "model", "weights", "attack", "solver", "gamma", "withheld", "seed", "image_id"),
    optional={"solver": "border", "withheld": ""},
)


def piece_files(folder: Path) -> dict[str, str]:
    """table.csv: shares of patches and PSNR up to order, PSNR as placed, by model and gamma."""
    rows = read_one_seed(folder, SCHEMA)
    numbers = ["right", "psnr_unordered", "psnr"]
    rows[numbers] = rows[numbers].astype(float).fillna(0.0)  # no answer shows no patch
    grouped = rows.groupby(BY, sort=False)
    table = pd.DataFrame(
        {
            "right_median": grouped["right"].median(),
            "right_first_decile": grouped["right"].quantile(0.1),
            "psnr_unordered_median": grouped["psnr_unordered"].median(),
            "psnr_median": grouped["psnr"].median(),
            "placed": grouped["psnr"].agg(lambda psnr: (psnr > RECOGNISABLE).mean()),
            "hidden_median": grouped["hidden"].median(),
            "seconds_median": grouped["seconds"].median(),
            "count": grouped.size(),
        }
    )
    return {"table.csv": csv(table.reset_index(), 4)}


def piece_block(folder: Path) -> str:
    """The table as Markdown."""
    heads = [
        "model",
        "γ",
        "attack",
        "placed by",
        "positions hidden",
        "patches above 25 dB, up to order: median (first decile)",
        "whole, up to order (median, dB)",
        "as placed (median, dB)",
        "placed above 20 dB",
        "CPU seconds (median)",
        "images",
    ]
    lines = [
        [
            row.model + (", longer training" if ".long." in row.weights else ""),
            (f"{row.gamma:g}" if row.gamma else "no positions")
            + (f", {row.withheld} withheld" if row.withheld else ""),
            f"`{row.attack}`",
            row.solver,
            f"{row.hidden_median:.0f}",
            f"{row.right_median:.0%} ({row.right_first_decile:.0%})",
            f"{row.psnr_unordered_median:.1f}",
            f"{row.psnr_median:.1f}",
            f"{row.placed:.0%}",
            f"{row.seconds_median:.1f}",
            str(row["count"]),
        ]
        for _, row in pd.read_csv(folder / "table.csv", keep_default_na=False).iterrows()
    ]
    return markdown_table(heads, lines)


PIECES = Rendering("pieces", piece_files, {"pieces": piece_block})
RENDERINGS = (PIECES,)
