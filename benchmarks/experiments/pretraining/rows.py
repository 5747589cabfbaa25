"""The rows of pre-trainings: one a training, seed and case."""

from __future__ import annotations

from typing import Any

from fedmjp.records import provenance
from fedmjp.records.rows import Schema
from fedmjp.training.config import TrainConfig

ROWS = Schema(
    keys=(
        *("training", "line", "model", "objective", "dataset", "train_limit", "test_limit", "recipe", "precision"),
        *("seed", "gamma", "gamma_pos", "accuracy", "loss", "seen", "hidden", "patches", "images"),
        *("train_loss", "steps", "images_seen", "train_seconds", "parameters", "weights", "provenance"),
        *("commit", "version", "torch_version", "device"),
    ),
    identity=("training", "gamma", "gamma_pos"),
)


def asked(config: TrainConfig) -> dict[str, Any]:
    """Everything that decides about a training's rows, as plain values."""
    return {
        "model": config.model_name(),
        "objective": config.objective,
        "dataset": config.data.data,
        "train_limit": config.data.train_limit,
        "test_limit": config.data.test_limit,
        "recipe": config.identity()["recipe"],
        "precision": config.activations(),
        "seed": config.seed,
    }


def training_id(config: TrainConfig) -> str:
    """Name of a training in the rows: equal for equal `asked`."""
    return provenance.run_id(asked(config))
