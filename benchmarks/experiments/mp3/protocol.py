"""Pre-train with MP3, train with labels after it and from scratch, and measure both.

Departs from the paper: a small model and a few epochs; fine-tuning without drop path, RandAugment, Mixup, CutMix,
erasing and repeated augmentation, and pre-training without drop path and RandAugment, all of which slow down a training
as short as this one. As in the paper both use the same images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from experiments.mp3.figures import draw
from experiments.mp3.measures import (
    block_tokens,
    correlation_numbers,
    head_distances,
    layer_neighbours,
    position_correlation,
)
from experiments.mp3.options import LINES, TEST_ETAS, MP3Options
from experiments.mp3.render import MP3
from experiments.mp3.rows import ROWS, START, TRAINED, Training, weights_of
from experiments.mp3.steps import write_steps
from experiments.pretraining.epochs import run_epochs, trained_columns
from experiments.session import Session
from fedmjp.evaluation.positions import position_accuracy
from fedmjp.metrics.intervals import wilson
from fedmjp.objectives.mp3 import MP3 as Objective
from fedmjp.records.rows import RowLog
from fedmjp.training.card import export
from fedmjp.training.trainer import Trainer

LAST = {"measure": "accuracy", "eta_test": None, "layer": None, "head": None, "network": TRAINED}


def run(options: MP3Options, console: Console) -> None:
    """Train what is missing, time steps, draw, and write the tables."""
    session = Session(options, console, ROWS)
    with session.rows() as log:
        for seed in options.seeds:
            for name in options.lines:
                _line(name, seed, options, session, log)
    if options.timing_repeats:
        write_steps(options, session.device)
    draw(options, session)
    rows = session.finish("python benchmarks/mp3.py", MP3)
    console.print(f"{rows['training'].nunique()} trainings", highlight=False)


def _line(name: str, seed: int, options: MP3Options, session: Session, log: RowLog) -> None:
    """Train a line with labels, and before it the encoder that it starts from, where rows or weights are missing."""
    line, encoder = LINES[name], None
    if line.pretrained:
        encoder = Training(options.pretraining(line, seed))
    start = weights_of(encoder, options) if encoder else None
    training = Training(options.supervised(line, seed), encoder)
    if log.has(LAST | {"training": training.name}):
        return
    shared = {"eta": line.eta, "pretraining_epochs": encoder.config.recipe.epochs} if encoder else {}
    if encoder and not (start.is_file() and log.has(LAST | {"training": encoder.name})):
        _train(encoder, {"line": ""} | shared, options, session, log)
    training = dataclasses.replace(training, config=options.supervised(line, seed, start))
    _train(training, {"line": name, "eta": None, "pretraining_epochs": 0} | shared, options, session, log)


def _train(training: Training, columns: dict[str, Any], options: MP3Options, session: Session, log: RowLog) -> None:
    """Train, append the rows, and write the weights."""
    trainer = Trainer(training.config)
    title = f"{columns['line'] or training.config.objective}, seed {training.config.seed}"
    before = () if columns["line"] else structure(trainer, options)
    found = [{"network": START} | row for row in before]
    history = run_epochs(trainer, title, session.console)
    found += [{"network": TRAINED} | row for row in structure(trainer, options)]
    found += [{"network": TRAINED} | row for row in outcome(trainer, history[-1]["test_accuracy"])]
    patches = trainer.model.module.patch_embed.num_patches
    shared = columns | {"training": training.name, "patches": patches} | training.asked
    shared |= trained_columns(trainer, history) | session.columns
    nothing = dict.fromkeys(("eta_test", "layer", "head", "value_low", "value_high"))
    for row in found:
        log.append(nothing | shared | row)
    path = weights_of(training, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    export(trainer, history, path)
    session.say(f"{title}: {found[-1]['value']:.1f} % of {trainer.learner.objective.accuracy_of}")


def outcome(trainer: Trainer, accuracy: float) -> Iterator[dict[str, Any]]:
    """What was learned, in per cent: of a pre-training the places found at several masking ratios; of every training,
    last, the accuracy of what it was trained for."""
    images, objective = trainer.data.test, trainer.learner.objective
    row = {"measure": "accuracy", "value": 100 * accuracy, "images": len(images)}
    if not isinstance(objective, Objective):
        yield row | _interval(accuracy, len(images))
        return
    for eta in TEST_ETAS:
        case = dataclasses.replace(objective, eta=eta)
        share = position_accuracy(case, trainer.model, images, trainer.device, trainer.config.seed)[1]
        yield {"measure": "places", "eta_test": eta, "value": 100 * share, "images": len(images)}
    yield row


def structure(trainer: Trainer, options: MP3Options) -> Iterator[dict[str, Any]]:
    """Neighbours by layer, correlations of the last layer, and distances of heads, of the model as it is now."""
    model, data, device = trainer.model, trainer.data, trainer.device
    step = max(1, len(data.train) // options.references)  # images may be sorted by class
    references = data.train.subset(range(0, len(data.train), step)[: options.references])
    images = {"images": len(data.test)}
    for layer, right in enumerate(layer_neighbours(model, references, data.test, device), start=1):
        share = float(right.double().mean())
        row = {"measure": "neighbours", "layer": layer, "value": 100 * share}
        yield row | images | _interval(share, len(data.test))
    last = torch.cat([tokens[-1] for tokens in block_tokens(model, data.test, device)])
    for name, value in correlation_numbers(*position_correlation(last)).items():
        yield {"measure": name, "value": value} | images
    for layer, heads in enumerate(head_distances(model, data.test, device).tolist(), start=1):
        for head, distance in enumerate(heads, start=1):
            yield {"measure": "distance", "layer": layer, "head": head, "value": distance} | images


def _interval(share: float, count: int) -> dict[str, float]:
    low, high = (100 * float(bound) for bound in wilson(share, count))
    return {"value_low": low, "value_high": high}
