"""One training recipe in float32 and in bfloat16: whether the accuracy is the same, and what a step costs.

Both precisions share seeds, and with them first weights, order of images and masks, so that differences are paired.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.trainings.options import PrecisionOptions, Variant
from experiments.trainings.seeds import ratio_curves, save_with_legend
from experiments.trainings.step_times import time_steps, timed_steps
from experiments.trainings.tables import TrainingTable

METRICS = ("accuracy", "consistency")


def variants_of(model: str, gamma: float) -> list[Variant]:
    """Each defence in both precisions; bfloat16 is compared with float32."""
    mjp = {"gamma": gamma}
    return [
        Variant("float32", model, precision="float32"),
        Variant("bfloat16", model, against="float32", precision="bfloat16"),
        Variant("MJP, float32", model, "mjp", mjp, precision="float32"),
        Variant("MJP, bfloat16", model, "mjp", mjp, against="MJP, float32", precision="bfloat16"),
    ]


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference, a curve a variant."""
    drawing = Figure(figsize=(6.8, 3.3), layout="constrained")
    panels = drawing.subplots(1, 2)
    for panel, metric in zip(panels, METRICS, strict=True):
        ratio_curves(panel, rows, metric, {name: name for name in rows["line"].unique()})
    save_with_legend(drawing, panels[0], path, columns=2)


def table(options: PrecisionOptions) -> TrainingTable:
    """The table."""
    variants = variants_of(options.model, options.training_gamma)
    return TrainingTable("precision", options, variants, {}, METRICS, figure, more=timed_steps)


def run(options: PrecisionOptions, console: Console) -> None:
    """Train what is missing, time steps, write tables and figure, and print the table."""
    wanted = table(options)
    time_steps(wanted, options, variants_of(options.timing_model or options.model, options.training_gamma))
    wanted.run(console)
