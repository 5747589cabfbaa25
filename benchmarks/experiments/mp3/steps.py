"""Seconds of a training step by masking ratio, beside a plain ViT's (Table 2).

Keys, values and scores are computed for the context only, as in the paper, so that a step gets shorter with eta. The
plain step has a class token and a classifier of 1,000 classes, MP3's the head over places.
"""

from __future__ import annotations

from statistics import median

import pandas as pd
import torch

from experiments.mp3.options import STEP_ETAS, MP3Options
from experiments.rendering import csv
from experiments.scaffold import PAPER
from experiments.speed.timing import timed
from fedmjp.config import ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import Defense
from fedmjp.models import MODELS
from fedmjp.objectives import Draws, Learner, read_objective

FILE = "steps.csv"


def write_steps(options: MP3Options, device: torch.device) -> None:
    """Time steps and write them to --out, unless they are there."""
    path = options.out / FILE
    if not path.exists():
        path.write_text(csv(step_table(options, device), 4))


def step_table(options: MP3Options, device: torch.device) -> pd.DataFrame:
    """Median seconds of a forward and backward pass of the plain ViT and of MP3, in turns, and their ratio."""
    model, batch = options.timing_model, options.timing_batch
    train = load_data("photos", size=MODELS.get(model).image_size).train
    images = train.images(range(batch)).to(device)
    labels = train.labels[:batch].to(device)
    entries = {None: "supervised"} | {eta: f"mp3:eta={eta:g}" for eta in STEP_ETAS}
    learners = {eta: _learner(entry, options, device) for eta, entry in entries.items()}
    seconds: dict[float | None, list[float]] = {eta: [] for eta in entries}
    for _ in range(options.timing_repeats + 1):
        for eta, learner in learners.items():
            seconds[eta].append(timed(lambda learner=learner: _step(learner, images, labels), device))
    paper = pd.read_csv(PAPER / "mp3_table2.csv")
    plain = float(paper[paper["eta"].isna()]["seconds"].iloc[0])
    by_eta = paper.set_index("eta")["seconds"]
    lines = []
    for eta, taken in seconds.items():
        theirs = plain if eta is None else by_eta[eta]
        ratios = pd.Series(taken[1:]) / pd.Series(seconds[None][1:])  # the first round warms up
        lines.append(
            {
                "model": model,
                "objective": entries[eta],
                "batch_size": batch,
                "repeats": options.timing_repeats,
                "seconds": median(taken[1:]),
                "ratio_median": ratios.median(),
                "ratio_q25": ratios.quantile(0.25),
                "ratio_q75": ratios.quantile(0.75),
                "paper_seconds": theirs,
                "paper_ratio": theirs / plain,
            }
        )
    return pd.DataFrame(lines)


def _learner(entry: str, options: MP3Options, device: torch.device) -> Learner:
    model = ModelConfig(options.timing_model, "random")
    return Learner.build(read_objective(entry), Defense(), model, num_classes=1000, seed=0, device=device)


def _step(learner: Learner, images: torch.Tensor, labels: torch.Tensor) -> None:
    draws = Draws.seeded(0, 0)
    loss = learner.loss(learner.views(images, draws, 1), labels, draws)
    learner.model.module.zero_grad(set_to_none=True)
    loss.backward()
