"""What is rendered from the rows of the features that a batch's classifier gradient gives away."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, markdown_table, read_rows
from fedmjp.records.rows import PROVENANCE, Schema

BY = ["model", "weights", "classes", "channels", "batch_size", "labels"]
RESULT = ("found", "feature_error", "repeated", "searches", "seconds", "obstacle")
SCHEMA = Schema(
    keys=(*PROVENANCE, "classes", "channels", "batch_size", "labels", "batch", "image_ids", *RESULT),
    identity=("dataset", "model", "weights", "batch_size", "labels", "seed", "batch"),
)


def batch_features_files(folder: Path) -> dict[str, str]:
    """table.csv: batches of which every feature was found, by model, size and labels."""
    rows = read_rows(folder, SCHEMA)
    rows["solved"] = rows["found"] == rows["batch_size"]
    grouped = rows.astype({"feature_error": float}).groupby(BY, sort=False)
    table = {"batches": grouped.size(), "solved": grouped["solved"].sum(), "repeated": grouped["repeated"].sum()}
    for name in ("feature_error", "searches", "seconds"):
        table |= {f"{name}_{statistic}": getattr(grouped[name], statistic)() for statistic in ("median", "max")}
    return {"table.csv": csv(pd.DataFrame(table).reset_index(), 4)}


def batch_features_block(folder: Path) -> str:
    """The table as Markdown: a line for each model and size."""
    heads = [
        "model",
        "classes",
        "images in the batch",
        "labels granted: batches with every feature",
        "labels inferred: batches with every feature",
        "largest error of a feature, found batches",
        "seconds, median (largest)",
    ]
    table = pd.read_csv(folder / "table.csv")
    lines = []
    for (model, weights, classes, size), own in table.groupby(BY[:3] + ["batch_size"], sort=False):
        by = own.set_index("labels")
        trained = "random" if "NOT TRAINED" in weights else "longer training" if ".long." in weights else "trained"
        lines.append(
            [
                f"{model}, {trained}",
                str(classes),
                str(size),
                *(f"{by.loc[how, 'solved']} of {by.loc[how, 'batches']}" for how in ("granted", "inferred")),
                f"{own['feature_error_max'].max():.0e}" if own["feature_error_max"].notna().any() else "",
                "{} ({})".format(*(_seconds(by.loc["inferred", f"seconds_{part}"]) for part in ("median", "max"))),
            ]
        )
    return markdown_table(heads, lines)


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1g}"


BATCH_FEATURES = Rendering("batch_features", batch_features_files, {"batch_features": batch_features_block})
RENDERINGS = (BATCH_FEATURES,)
