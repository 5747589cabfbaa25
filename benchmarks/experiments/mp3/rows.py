"""The rows of MP3's tables: one a training and measured number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from experiments.mp3.options import MP3Options
from experiments.pretraining import rows
from fedmjp.records import provenance
from fedmjp.records.rows import Schema
from fedmjp.training.config import TrainConfig

# `measure` is accuracy (images, %), places (%, at `eta_test`), neighbours (images, %, after block `layer`), distance
# (of head `head` of block `layer`, in shares of the side), or a correlation of `measures.CORRELATIONS`. `value_low` and
# `value_high` are 95 % intervals over the test images of this training, where images are counted.
ROWS = Schema(
    keys=(
        *("training", "encoder", "line", "eta", "pretraining_epochs", "network", "measure", "eta_test", "layer"),
        *("head", "value", "value_low", "value_high", "images", "patches"),
        *("model", "objective", "dataset", "train_limit", "test_limit", "recipe", "precision", "seed"),
        *("train_loss", "steps", "images_seen", "train_seconds", "parameters", "weights", "provenance"),
        *("run_id", "commit", "version", "torch_version", "device"),
    ),
    identity=("training", "network", "measure", "eta_test", "layer", "head"),
)
START, TRAINED = "start", "trained"


@dataclasses.dataclass(frozen=True)
class Training:
    """One training and what it starts from.

    Attributes:
        config: its options.
        encoder: the pre-training that its weights come from, or None.
    """

    config: TrainConfig
    encoder: Training | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Everything that decides about its rows, as plain values; where its files lie does not."""
        return rows.asked(self.config) | {"encoder": self.encoder.name if self.encoder else ""}

    @property
    def name(self) -> str:
        """In the rows: equal for equal `asked`."""
        return provenance.run_id(self.asked)


def weights_of(training: Training, options: MP3Options) -> Path:
    """The file of a training's weights, there or not."""
    return options.weights / training.name / "model.safetensors"
