"""What is rendered from the rows of the trainings, and from the tables of the checkpoints that ship."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, markdown_table
from experiments.trainings import ablation, backbones, fine_tuning, masking_ratio, precision
from experiments.trainings.options import (
    FINE,
    AblationOptions,
    BackboneOptions,
    FineTuningOptions,
    PrecisionOptions,
    RatioOptions,
)
from experiments.trainings.training_curves import curves
from fedmjp.config import DataConfig

PUBLIC_VIT_TI = "vit_tiny_patch16_224.tiny_imagenet.safetensors"  # what the committed fine-tunings start from
EVERY_LINE = tuple("ABCDEFGHIJ")  # of Table 2
LONG = FineTuningOptions(  # five passes in batches of four times the size, at twice the rate a step
    weights=PUBLIC_VIT_TI,
    lines=EVERY_LINE,
    more_gammas=(0.03, 0.09, 0.15, 0.21, 0.27, 0.5, 0.7, 0.9),
    data=DataConfig("tiny-imagenet", None, 30_000, 5_000),
    recipe=replace(FINE, epochs=5, batch_size=128, learning_rate=0.001),
)


def training_block(folder: Path) -> str:
    """The checkpoints that ship, a line each."""
    lines = []
    for _, row in pd.read_csv(folder / "table.csv").iterrows():
        gamma = "" if pd.isna(row.gamma) else f"{row.gamma:g}"
        cells = [f"`{row.model}`", row.dataset, gamma, f"{row.epochs}", f"{row.images_seen:,}", f"{row.accuracy:.1f} %"]
        lines.append(cells)
    return markdown_table(["checkpoint", "data", "γ in training", "epochs", "images seen", "top-1"], lines)


RENDERINGS = (
    Rendering("training", blocks={"training": training_block}, figures=curves),
    Rendering("training_long", blocks={"training_long": training_block}, figures=curves),
    fine_tuning.table(FineTuningOptions(weights=PUBLIC_VIT_TI, lines=EVERY_LINE)).rendering(),
    fine_tuning.table(LONG).rendering("fine_tuning_long"),
    backbones.table(BackboneOptions()).rendering(),
    ablation.table(AblationOptions()).rendering(),
    masking_ratio.table(RatioOptions()).rendering(),
    precision.table(PrecisionOptions()).rendering(),
)
