"""MJP trained with different masking ratios: Table 3 and Figure 2 (c) of the MJP paper.

The text copy of the paper lost some of Table 3's figures; those of ratios 0 and 0.1 are taken from lines D and J of
Table 2 and from Table 1, whose Consistency is the same. Departs from the paper as `backbones` does.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from experiments.scaffold import PAPER
from experiments.trainings.options import RatioOptions, Variant
from experiments.trainings.seeds import ratio_curves, save_with_legend
from experiments.trainings.tables import TrainingTable

METRICS = ("accuracy", "diff_norm", "diff_share", "consistency")


def variants_of(options: RatioOptions) -> list[Variant]:
    """A variant a masking ratio in training.

    Raises:
        UsageError: no ratio, or one twice.
    """
    if not options.training_gammas or len(set(options.training_gammas)) < len(options.training_gammas):
        raise UsageError("--training-gammas takes different numbers, at least one")
    first = f"{options.training_gammas[0]:g}"
    variants = []
    for gamma in options.training_gammas:
        name, without = f"{gamma:g}", {"positions": "own"} if gamma == 0 else {}
        against = "" if name == first else first
        variants.append(Variant(name, options.model, "mjp", {"gamma": gamma} | without, against=against))
    return variants


def paper() -> dict[str, dict[str, float]]:
    """Table 3 by masking ratio in training, with what other tables say of the same trainings."""
    own = pd.read_csv(PAPER / "mjp_table3.csv").set_index("training_gamma")
    ablation = pd.read_csv(PAPER / "mjp_table2.csv").set_index("line")["accuracy"]
    first = pd.read_csv(PAPER / "mjp_table1.csv").set_index("model")["diff_norm"]
    own.loc[0.0, "accuracy"], own.loc[0.1, "accuracy"] = ablation["D"], ablation["J"]
    own.loc[0.1, "diff_norm"] = first["deit_s_mjp"]
    return {f"{gamma:g}": row.to_dict() for gamma, row in own.iterrows()}


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference, a curve a ratio in training."""
    drawing = Figure(figsize=(6.8, 3.3), layout="constrained")
    panels = drawing.subplots(1, 2)
    for panel, metric in zip(panels, ("accuracy", "consistency"), strict=True):
        ratio_curves(panel, rows, metric, {name: f"trained with γ = {name}" for name in rows["line"].unique()})
    save_with_legend(drawing, panels[0], path, columns=3)


def table(options: RatioOptions) -> TrainingTable:
    """The table."""
    return TrainingTable("masking_ratio", options, variants_of(options), paper(), METRICS, figure)


def run(options: RatioOptions, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table."""
    table(options).run(console)
