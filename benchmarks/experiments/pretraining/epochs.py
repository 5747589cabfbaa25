"""Train with a progress bar, and what all rows of a training say of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedmjp.training.trainer import Trainer

History = list[dict[str, float]]


def run_epochs(trainer: Trainer, title: str, console: Console) -> History:
    """Train all epochs; returns the record of each."""
    epochs, columns = (
        trainer.recipe.epochs,
        (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=epochs * len(trainer.batches))
        return [trainer.epoch(number, lambda loss: bar.advance(task)) for number in range(1, epochs + 1)]


def trained_columns(trainer: Trainer, history: History) -> dict[str, Any]:
    """A training's loss, steps, time, size and origin."""
    steps = int(sum(line["steps"] for line in history))
    return {
        "train_loss": history[-1]["train_loss"],
        "steps": steps,
        "images_seen": steps * trainer.recipe.batch_size,
        "train_seconds": sum(line["train_seconds"] for line in history),
        "parameters": sum(p.numel() for p in trainer.model.module.parameters()),
        "weights": f"trained from {trainer.model.provenance.removesuffix(', NOT TRAINED')}",
        "provenance": trainer.data.provenance,
    }
