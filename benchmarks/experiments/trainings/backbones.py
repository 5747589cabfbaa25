"""Three families of backbones with and without MJP: Table 1 and Figure 2 (a), (b) of the MJP paper.

Departs from the paper: small models on a part of CIFAR-10, seen once, instead of 300 epochs of ImageNet-1k. Signs of
differences can be compared, figures cannot; `seeds` says what the verdicts mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.scaffold import PAPER
from experiments.trainings.options import BackboneOptions, Variant
from experiments.trainings.seeds import ratio_curves, save_with_legend
from experiments.trainings.tables import TrainingTable

# Which of the paper's models a name is compared with, by its first word.
FAMILIES = {"vit": "deit_s", "deit": "deit_s", "swin": "swin_t", "resnet": "resnet50", "resnet50": "resnet50"}
METRICS = ("accuracy", "diff_norm", "diff_share", "consistency")


def variants_of(options: BackboneOptions) -> list[Variant]:
    """Two variants a model."""
    found = []
    for model in options.models:
        found.append(Variant(model, model))
        found.append(Variant(f"{model} + MJP", model, "mjp", {"gamma": options.training_gamma}, against=model))
    return found


def paper(variants: Sequence[Variant]) -> dict[str, dict[str, float]]:
    """Table 1 by variant."""
    table = pd.read_csv(PAPER / "mjp_table1.csv", keep_default_na=False)
    table["family"] = table["model"].str.removesuffix("_mjp")
    own = table.set_index(["family", "defense"])[["accuracy", "diff_norm", "consistency"]]
    kinds = {v.name: (FAMILIES.get(v.model.split("_")[0]), v.defense) for v in variants}
    return {name: own.loc[kind].to_dict() for name, kind in kinds.items() if kind in own.index}


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference."""
    drawing = Figure(figsize=(6.8, 3.3), layout="constrained")
    panels = drawing.subplots(1, 2)
    for panel, metric in zip(panels, ("accuracy", "consistency"), strict=True):
        ratio_curves(panel, rows, metric, {name: name for name in rows["line"].unique()})
    save_with_legend(drawing, panels[0], path, columns=3)


def table(options: BackboneOptions) -> TrainingTable:
    """The table."""
    variants = variants_of(options)
    return TrainingTable("backbones", options, variants, paper(variants), METRICS, figure)


def run(options: BackboneOptions, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table."""
    table(options).run(console)
