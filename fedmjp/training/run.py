"""Run one training: resume it, show its progress, export its weights."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedmjp.training.card import export
from fedmjp.training.config import TrainConfig
from fedmjp.training.folder import TrainingFolder
from fedmjp.training.trainer import Trainer


def train(config: TrainConfig, console: Console) -> Path:
    """Train, or resume a training, and export its weights; a finished training is exported again.

    Args:
        config: all options.
        console: receives progress and results.

    Returns:
        Path of the exported weights.

    Raises:
        UsageError: options, data, weights, device or folder cannot be used.
    """
    trainer = Trainer(config)
    guarantee = trainer.defense.guarantee(trainer.privacy_schedule)
    folder = TrainingFolder(config, guarantee)
    if guarantee:
        console.print(guarantee, highlight=False, soft_wrap=True)
    state, history = folder.load()
    if state is not None:
        trainer.load_state(state)
        folder.write_history(history)  # a crash may have come between the checkpoint and this
        console.print(f"resumed after epoch {len(history)}", highlight=False)
    for number in range(len(history) + 1, config.recipe.epochs + 1):
        history.append(_epoch(trainer, number, console))
        folder.save(trainer.state(), history)
    folder.write_history(history)
    accuracy, objective = export(trainer, history, folder.weights), trainer.learner.objective
    console.print(f"float16 weights: {objective.score} {accuracy:.2%} ({objective.accuracy_of})", highlight=False)
    return folder.weights


def _epoch(trainer: Trainer, number: int, console: Console) -> dict[str, float]:
    """Train one epoch with a progress bar and print its results."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    title = f"epoch {number}/{trainer.recipe.epochs}"
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=len(trainer.batches))
        line = trainer.epoch(number, lambda loss: bar.update(task, advance=1, description=f"{title}, loss {loss:.3f}"))
    console.print(
        f"{title}  loss {line['train_loss']:.3f}  test loss {line['test_loss']:.3f}  "
        f"{trainer.learner.objective.score} {line['test_accuracy']:.2%}  {line['train_seconds']:.0f} s  "
        f"{line['images_per_second']:.0f} images/s",
        highlight=False,
    )
    return line
