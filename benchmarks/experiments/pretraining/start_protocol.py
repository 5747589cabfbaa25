"""Pre-train, fine-tune plainly and under MJP, and measure accuracy.

Images of the fine-tuning are among those of the pre-training. That a supervised pre-training reads more labels than the
fine-tuning, and of the same classes, makes it the line that pre-trainings without labels are held against, not one of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from experiments.pretraining.epochs import run_epochs, trained_columns
from experiments.pretraining.rows import asked, training_id
from experiments.pretraining.start_options import DEFENCES, SCRATCH, STARTS, StartOptions
from experiments.pretraining.start_render import ROWS, STARTS_TABLE
from experiments.session import Session
from fedmjp.evaluation.accuracy import BATCH
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog
from fedmjp.training.card import export
from fedmjp.training.config import TrainConfig
from fedmjp.training.trainer import Trainer


def run(options: StartOptions, console: Console) -> None:
    """Train what is missing, then write and print the table."""
    session = Session(options, console, ROWS)
    with session.rows() as log:
        for seed in options.seeds:
            for name in options.starts:
                _start(name, seed, options, session, log)
    session.finish("python benchmarks/pretraining.py", STARTS_TABLE)
    console.print((options.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)


def _start(name: str, seed: int, options: StartOptions, session: Session, log: RowLog) -> None:
    """The rows of what starts from `name`: the pre-training's own, and one a defence."""
    encoder, begun = None, ""
    if name != SCRATCH:
        begun = training_id(options.pretraining(name, seed))
        encoder = options.pretrained / begun / "model.safetensors"
        if not encoder.is_file() or not log.has({"training": begun}):
            row = pretrain(name, seed, encoder, options, session)
            log.append(session.columns | _case(name, "", seed) | row | {"training": begun})
    for defense in DEFENCES:
        config = options.fine_tuning(defense, seed, encoder)
        gamma = options.gamma if defense == "mjp" else None
        training = provenance.run_id(asked(config) | {"start": begun, "gamma": gamma})
        if not log.has({"training": training}):
            row = fine_tune(config, f"{name}, then {defense}, seed {seed}", session)
            row |= {"training": training, "gamma": gamma, "train_limit": options.labelled}
            log.append(session.columns | _case(name, defense, seed) | row)


def pretrain(name: str, seed: int, path: Path, options: StartOptions, session: Session) -> dict[str, Any]:
    """Pre-train, write the weights, and return what the row says of it."""
    trainer = Trainer(options.pretraining(name, seed))
    history = run_epochs(trainer, f"{name}, seed {seed}", session.console)
    path.parent.mkdir(parents=True, exist_ok=True)
    export(trainer, history, path)
    row = {"accuracy": 100 * history[-1]["test_accuracy"], "right": None, "gamma": None}
    row |= {"accuracy_of": trainer.learner.objective.accuracy_of, "train_limit": options.data.train_limit}
    session.say(f"{name}, seed {seed}: {row['accuracy']:.1f} % of {row['accuracy_of']}")
    return row | _about(trainer, history)


def fine_tune(config: TrainConfig, title: str, session: Session) -> dict[str, Any]:
    """Fine-tune, and return what the row says of it."""
    trainer = Trainer(config)
    history = run_epochs(trainer, title, session.console)
    right = right_answers(trainer)
    row = {"accuracy": 100 * float(right.mean()), "accuracy_of": "images", "right": np.packbits(right).tobytes().hex()}
    session.say(f"{title}: {row['accuracy']:.1f} % of {len(right)} test images")
    return row | _about(trainer, history)


@torch.no_grad()
def right_answers(trainer: Trainer) -> np.ndarray:
    """Whether each test image, unchanged, is answered correctly, (n,) bool."""
    model, images = trainer.model, trainer.data.test
    module, found = model.module.eval(), []
    for start in range(0, len(images), BATCH):
        indices = range(start, min(start + BATCH, len(images)))
        logits = module(model.normalise(images.images(indices).to(trainer.device)))
        found.append(logits.argmax(dim=1).cpu() == images.labels[start : start + BATCH])
    return torch.cat(found).numpy()


def _case(name: str, defense: str, seed: int) -> dict[str, Any]:
    return {
        "start": name,
        "objective": STARTS[name].objective if STARTS[name] else "",
        "defense": defense,
        "seed": seed,
    }


def _about(trainer: Trainer, history: list[dict[str, float]]) -> dict[str, Any]:
    config = trainer.config
    return trained_columns(trainer, history) | {
        "model": trainer.model.name,
        "dataset": config.data.data,
        "recipe": config.identity()["recipe"],
        "precision": config.activations(),
        "images": len(trainer.data.test),
    }
