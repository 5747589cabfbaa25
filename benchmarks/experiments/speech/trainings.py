"""Spoken words, supervised and after MP3: Tables 5 and 6 of the MP3 paper.

Departs from the paper: synthetic words of ten classes by default, a few hundred of them and a few epochs instead of
22,246 words, twelve classes and 30,000 steps; a cosine instead of steps of the rate; no early stopping. The lines can
be compared with each other, not with the paper's.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from experiments.session import Session
from experiments.speech.options import TrainingOptions
from experiments.speech.render import SPEECH, TRAININGS
from fedmjp.data import DataBundle
from fedmjp.training import train
from fedmjp.training.folder import TrainingFolder
from fedmjp.training.trainer import Trainer, load


def run(options: TrainingOptions, console: Console) -> None:
    """Train what is missing, write the table, and print it."""
    session = Session(options, console, TRAININGS)
    with session.rows() as rows:
        for seed in options.seeds:
            data = load(options.config(seed))
            for line, epochs in options.lines():
                if rows.has({"line": line, "seed": seed}):
                    continue
                started = time.perf_counter()
                row = trained_row(epochs, seed, data, options)
                rows.append(session.columns | {"line": line, "seed": seed, "provenance": data.provenance} | row)
                console.print(
                    f"{line}, seed {seed}  accuracy {row['accuracy']:.1f} %  {time.perf_counter() - started:.0f} s",
                    highlight=False,
                )
    session.finish("python benchmarks/speech.py", SPEECH)
    console.print((options.out / "table.csv").read_text(), highlight=False)


def trained_row(epochs: int, seed: int, data: DataBundle, options: TrainingOptions) -> dict[str, Any]:
    """Pre-train if need be, train words, and measure."""
    places = None
    if epochs:
        config = options.pretraining_config(epochs, seed)
        train(config, Console(quiet=True))
        places = 100 * TrainingFolder(config).load()[1][-1]["test_accuracy"]
    config = options.config(seed, epochs)
    trainer = Trainer(config, data)
    history = [trainer.epoch(number, lambda loss: None) for number in range(1, config.recipe.epochs + 1)]
    steps = sum(record["steps"] for record in history)
    return {
        "model": trainer.model.name,
        "weights": f"trained from {trainer.model.provenance.removesuffix(', NOT TRAINED')}",
        "pretraining_epochs": epochs,
        "given": options.given if epochs else None,
        "place_accuracy": places,
        "accuracy": 100 * history[-1]["test_accuracy"],
        "test_loss": history[-1]["test_loss"],
        "train_loss": history[-1]["train_loss"],
        "recipe": config.identity()["recipe"],
        "words_seen": steps * config.recipe.batch_size,
        "train_seconds": sum(record["train_seconds"] for record in history),
        "parameters": sum(p.numel() for p in trainer.model.module.parameters()),
    }
