"""The cost of MJP on one training step: `options.StepOptions`."""

from __future__ import annotations

import math
import random
from statistics import median

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from experiments.rendering import csv
from experiments.session import prepare_torch
from experiments.speed.options import StepOptions
from experiments.speed.timing import timed
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.models import BuiltModel, build_model
from fedmjp.objectives import client_loss
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run


def step(model: BuiltModel, defense: Defense, images: Tensor, labels: Tensor, generator: torch.Generator) -> None:
    """One client step: defence, forward, backward."""
    seen = defense.on_input(images, model, generator, 1)
    loss = client_loss(model, seen.images, labels, seen.position_mask, defense.loss_weights())
    model.module.zero_grad(set_to_none=True)
    loss.backward()


def looped_input(images: Tensor, grid: tuple[int, int], patch: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Masks and jigsaws as one would first write them: image by image, block by block, patch by patch."""
    rows, columns = grid
    wanted = math.floor(gamma * rows * columns + 0.5)
    moved, masks = images.clone(), torch.zeros(len(images), rows * columns, dtype=torch.bool)
    for b in range(len(images)):
        chosen: list[tuple[int, int]] = []
        while len(chosen) < wanted:
            least = min(16, wanted - len(chosen))
            area = random.uniform(least, wanted - len(chosen))
            aspect = math.exp(random.uniform(math.log(0.3), -math.log(0.3)))
            height = min(max(round(math.sqrt(area * aspect)), 1), rows)
            width = min(max(round(math.sqrt(area / aspect)), 1), columns)
            top, left = random.randint(0, rows - height), random.randint(0, columns - width)
            for place in ((y, x) for y in range(top, top + height) for x in range(left, left + width)):
                if place not in chosen and len(chosen) < wanted:
                    chosen.append(place)
        for (y, x), (sy, sx) in zip(chosen, random.sample(chosen, len(chosen)), strict=True):
            source = images[b, :, sy * patch : (sy + 1) * patch, sx * patch : (sx + 1) * patch]
            moved[b, :, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] = source
            masks[b, y * columns + x] = True
    return moved, masks


def measure(options: StepOptions) -> pd.DataFrame:
    """One row a masking ratio."""
    device = prepare_torch(options)
    plain = build_model(options.model, num_classes=8, weights="random")
    masked = build_model(f"{options.model}_mjp", num_classes=8, weights="random", dal="nonlinear")
    for model in (plain, masked):
        model.module.to(device)
    train = load_data("photos", size=plain.image_size).train
    images = train.images(list(range(options.batch_size))).to(device)
    labels = train.labels[: options.batch_size].to(device)
    generator, none = torch.Generator().manual_seed(0), DEFENSES.get("none")()
    rows = []
    for gamma in options.gammas:
        mjp = DEFENSES.get("mjp")(gamma=gamma)
        works = {
            "plain_step": lambda: step(plain, none, images, labels, generator),
            "mjp_step": lambda mjp=mjp: step(masked, mjp, images, labels, generator),
            "mjp_input": lambda mjp=mjp: mjp.on_input(images, masked, generator, 1),
            "looped_input": lambda gamma=gamma: looped_input(images, masked.grid, masked.patch_size, gamma),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in track(range(options.steps + 1), description=f"gamma {gamma}", transient=True):
            for name, work in works.items():
                seconds[name].append(timed(work, device))
        rows.append(_row(options, gamma, {n: s[1:] for n, s in seconds.items()}, device))  # the first round warms up
    return pd.DataFrame(rows)


def _row(options: StepOptions, gamma: float, seconds: dict[str, list[float]], device: torch.device) -> dict:
    ratios = [b / a for a, b in zip(seconds["plain_step"], seconds["mjp_step"], strict=True)]
    spread = pd.Series(ratios).quantile([0.25, 0.75]).tolist()
    middle = {name: median(values) for name, values in seconds.items()}
    return {
        "model": options.model,
        "batch_size": options.batch_size,
        "gamma": gamma,
        "plain_step_seconds_median": middle["plain_step"],
        "mjp_step_seconds_median": middle["mjp_step"],
        "step_ratio_median": median(ratios),
        "step_ratio_q25": spread[0],
        "step_ratio_q75": spread[1],
        "input_share": middle["mjp_input"] / middle["plain_step"],
        "looped_over_vectorised": middle["looped_input"] / middle["mjp_input"],
        "repeats": options.steps,
        "device": provenance.device_name(device),
        "commit": provenance.commit(),
        "torch_version": torch.__version__,
    }


def run(options: StepOptions, console: Console) -> None:
    """Measure, write and print the table."""
    table = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.csv").write_text(csv(table, 5))
    note_run(options.out, "python benchmarks/mjp_overhead.py", devices=table["device"], overwritten=True)
    console.print(
        table.drop(columns=["commit", "torch_version", "device"]).round(4).to_string(index=False), highlight=False
    )
    worst = table["step_ratio_median"].max()
    console.print(f"MJP step / plain step: {worst:.3f} at worst (paper: 1.02; aim: under 1.02)", highlight=False)
    console.print(f"table: {options.out}", soft_wrap=True, highlight=False)
