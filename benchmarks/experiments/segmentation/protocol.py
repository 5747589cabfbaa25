"""Segmentation with and without MJP: Table 3 of the MJP supplement.

Departs from the supplement: encoders of less than a million parameters that saw 10,000 images of CIFAR-10 once, and
mosaics of eight photographs, instead of Swin-Tiny, ImageNet-1k and ADE20K. Signs of differences can be compared,
figures cannot. Lines under MJP in segmentation are not in the supplement.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console

from experiments.segmentation.options import Line, Options, lines_of
from experiments.segmentation.render import COLOUR, ROWS, SEGMENTATION
from experiments.session import Session
from fedmjp.data import DataBundle
from fedmjp.evaluation.segmentation import Confusion, SegmentationScores, segmentation_scores
from fedmjp.training import train
from fedmjp.training.trainer import Trainer, load

LEVELS = 8  # of each colour channel, for the line "colour alone"
BATCH = 64


def run(options: Options, console: Console) -> None:
    """Train what is missing, write the table, and print it."""
    session = Session(options, console, ROWS)
    lines = lines_of(options.models, options.pretrained_models)
    with session.rows() as rows:
        for seed in options.seeds:
            data = load(options.config(lines[0], seed))
            for line in [Line(COLOUR, "none"), *lines]:
                if rows.has({"line": line.name, "seed": seed}):
                    continue
                started = time.perf_counter()
                row = colour_row(data) if line.name == COLOUR else trained_row(line, seed, data, options, console)
                about = {"line": line.name, "pretraining": line.pretraining, "defense": line.defense, "seed": seed}
                rows.append(session.columns | about | {"provenance": data.provenance} | row)
                console.print(
                    f"{line.name}, seed {seed}  mean IoU {row['miou']:.1f} %  {time.perf_counter() - started:.0f} s",
                    highlight=False,
                )
    session.finish("python benchmarks/segmentation.py", SEGMENTATION)
    console.print((options.out / "table.csv").read_text(), highlight=False)


def trained_row(line: Line, seed: int, data: DataBundle, options: Options, console: Console) -> dict[str, Any]:
    """Pre-train if need be, train segmentation, and measure."""
    if line.pretraining:
        train(options.pretraining_config(line, seed), Console(quiet=True))
    config = options.started(line, seed)
    trainer = Trainer(config, data)
    history = [trainer.epoch(number, lambda loss: None) for number in range(1, config.recipe.epochs + 1)]
    found = segmentation_scores(trainer.model, data.test, trainer.device)
    steps = sum(record["steps"] for record in history)
    return scores(found) | {
        "model": trainer.model.name,
        "weights": f"trained from {trainer.model.provenance.removesuffix(', NOT TRAINED')}",
        "recipe": config.identity()["recipe"],
        "gamma": options.gamma,
        "train_loss": history[-1]["train_loss"],
        "images_seen": steps * config.recipe.batch_size,
        "train_seconds": sum(record["train_seconds"] for record in history),
        "parameters": sum(p.numel() for p in trainer.model.module.parameters()),
    }


def colour_row(data: DataBundle) -> dict[str, Any]:
    """Each pixel gets the class that is most frequent among training pixels of its colour, in 8 levels a channel."""
    classes = len(data.classes)
    counts = torch.zeros(LEVELS**3, classes)
    for start in range(0, len(data.train), BATCH):
        indices = range(start, min(start + BATCH, len(data.train)))
        places, labels = colours(data.train.images(indices)).flatten(), data.train.targets(indices).flatten()
        known = labels < classes
        counts.index_put_((places[known], labels[known]), torch.ones(int(known.sum())), accumulate=True)
    best, confusion = counts.argmax(dim=1), Confusion(classes, torch.device("cpu"))
    for start in range(0, len(data.test), BATCH):
        indices = range(start, min(start + BATCH, len(data.test)))
        confusion.add(best[colours(data.test.images(indices))], data.test.targets(indices))
    unused = dict.fromkeys(("recipe", "gamma", "train_loss", "images_seen", "train_seconds", "parameters"))
    return scores(confusion.result(0.0)) | unused | {"model": "none", "weights": "none", "test_loss": None}


def colours(images: torch.Tensor) -> torch.Tensor:
    """Images (B, 3, H, W) in [0, 1] -> number of each pixel's colour, (B, H, W) int64 below LEVELS^3."""
    levels = (images * LEVELS).long().clamp(max=LEVELS - 1)
    return (levels[:, 0] * LEVELS + levels[:, 1]) * LEVELS + levels[:, 2]


def scores(found: SegmentationScores) -> dict[str, Any]:
    """Columns of a row, in per cent."""
    return {
        "miou": 100 * found.miou,
        "macc": 100 * found.macc,
        "iou": [100 * value for value in found.iou],
        "test_loss": found.loss,
    }
