"""The variants of MJP one by one: Table 2 of the MJP paper, and the cost of a training step of each.

Departs from the paper as `backbones` does.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.scaffold import PAPER
from experiments.trainings.options import AblationOptions, Variant
from experiments.trainings.seeds import difference_points, save_with_legend
from experiments.trainings.step_times import time_steps, timed_steps
from experiments.trainings.tables import TrainingTable

METRICS = ("accuracy", "consistency")
PLAIN = "A"


def variants_of(model: str, gamma: float) -> list[Variant]:
    """Lines A to J of the paper's table."""

    def mjp(**options: object) -> dict[str, object]:
        return {"gamma": gamma, "dal": "none"} | options

    kinds: dict[str, tuple[str, str, dict[str, object]]] = {
        PLAIN: (model, "none", {}),
        "B": (f"{model}_nope", "none", {}),
        "C": (model, "spp", {}),
        "D": (model, "mjp", {"gamma": 0.0, "positions": "own"}),
        "E": (model, "mjp", mjp(positions="own")),
        "F": (model, "mjp", mjp(positions="index")),
        "G": (model, "mjp", mjp()),
        "H": (model, "mjp", mjp(dal="pca")),
        "I": (model, "mjp", mjp(dal="linear")),
        "J": (model, "mjp", {"gamma": gamma}),
    }
    return [Variant(name, *kind, against="" if name == PLAIN else PLAIN) for name, kind in kinds.items()]


def paper() -> pd.DataFrame:
    """Table 2 by line."""
    return pd.read_csv(PAPER / "mjp_table2.csv").set_index("line")


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Each variant's difference to A, ours and the paper's."""
    methods = paper()["method"]
    labels = {name: f"{name}: {methods[name]}" for name in table["line"].unique() if name != PLAIN}
    drawing = Figure(figsize=(6.8, 3.6), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        difference_points(panel, table, metric, labels)
    save_with_legend(drawing, panels[0], path, columns=2)


def table(options: AblationOptions) -> TrainingTable:
    """The table."""
    variants = variants_of(options.model, options.training_gamma)
    notes = paper()["method"].to_dict() | {PLAIN: f"plain {options.model} (paper: DeiT-S)"}
    figures = paper()[list(METRICS)].to_dict("index")
    return TrainingTable("ablation", options, variants, figures, METRICS, figure, notes, timed_steps)


def run(options: AblationOptions, console: Console) -> None:
    """Train what is missing, time steps, write tables and figure, and print the table."""
    wanted = table(options)
    time_steps(wanted, options, variants_of(options.timing_model or options.model, options.training_gamma))
    wanted.run(console)
