"""Seconds of a training step by masking ratio, beside a plain ViT's (Table 2).

Keys, values and scores are computed for the context only, as in the paper, so that a step gets shorter with eta. Steps
are those of a training: loss, gradient and AdamW. The plain one has a class token and a classifier, MP3's the head over
places. The paper's are of a ViT-B on a GPU.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from statistics import median

import pandas as pd
import torch

from experiments.mp3.options import STEP_ETAS, MP3Options
from experiments.rendering import csv
from experiments.scaffold import PAPER
from experiments.speed.timing import timed
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.objectives import Draws
from fedmjp.records import provenance
from fedmjp.training.config import UNAUGMENTED, TrainConfig
from fedmjp.training.trainer import Trainer

FILE, PLAIN = "steps.csv", "supervised"


def write_steps(options: MP3Options, device: torch.device) -> None:
    """Time steps and write them to --out, unless they are there."""
    path = options.out / FILE
    if not path.exists():
        path.write_text(csv(step_table(options, device), 4))


def step_table(options: MP3Options, device: torch.device) -> pd.DataFrame:
    """Median seconds of a training step of the plain ViT and of MP3, in turns, and their ratio; CPU time on a CPU."""
    paper = pd.read_csv(PAPER / "mp3_table2.csv")
    plain = float(paper[paper["eta"].isna()]["seconds"].iloc[0])
    by_eta = paper.set_index("eta")["seconds"]
    theirs = {PLAIN: plain} | {f"mp3:eta={eta:g}": by_eta[eta] for eta in STEP_ETAS}
    trainers = {entry: Trainer(_config(entry, options)) for entry in theirs}
    clock = time.process_time if device.type == "cpu" else time.perf_counter  # other processes do not count
    draws, seconds = Draws.seeded(0, 0), {entry: [] for entry in theirs}
    images, labels = next(trainers[PLAIN].batches.epoch(1, device))
    for _ in range(options.timing_repeats + 1):
        for entry, trainer in trainers.items():
            step = partial(trainer.step, images, labels, draws, 1)
            seconds[entry].append(timed(step, device, clock))
    lines = []
    for entry, taken in seconds.items():
        ratios = pd.Series(taken[1:]) / pd.Series(seconds[PLAIN][1:])  # the first round warms up
        line = {"model": options.timing_model, "objective": entry, "batch_size": options.timing_batch}
        line |= {"precision": trainers[entry].config.activations(), "repeats": options.timing_repeats}
        line |= {"seconds": median(taken[1:]), "ratio_median": ratios.median()}
        line |= {"ratio_q25": ratios.quantile(0.25), "ratio_q75": ratios.quantile(0.75)}
        lines.append(line | {"paper_seconds": theirs[entry], "paper_ratio": theirs[entry] / plain})
    return pd.DataFrame(lines).assign(**provenance.columns(device))


def _config(entry: str, options: MP3Options) -> TrainConfig:
    """A training on embedded photographs, of which single steps are timed."""
    recipe = dataclasses.replace(UNAUGMENTED, epochs=1, warmup_epochs=0, label_smoothing=0)
    return TrainConfig(
        objective=entry,
        model=ModelConfig(options.timing_model, "random"),
        data=DataConfig("photos"),
        recipe=dataclasses.replace(recipe, batch_size=options.timing_batch),
        precision=options.precision,
        device=options.device,
        threads=options.threads,
    )
