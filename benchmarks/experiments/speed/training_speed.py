"""Central training against a bare timm loop on the same batches: `options.TrainingSpeedOptions`.

Both start from the same weights and see the same batches in turn, so that they must report the same losses; a run whose
losses differ ends, because then it compares two different trainings.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from itertools import count

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.rendering import csv
from experiments.scaffold import Failure
from experiments.session import prepare_torch
from experiments.speed.options import TrainingSpeedOptions
from experiments.speed.render import TRAINING
from experiments.speed.timing import timed
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.models import MODELS
from fedmjp.objectives import Draws
from fedmjp.records import provenance
from fedmjp.records.files import write_whole
from fedmjp.records.run_record import note_run
from fedmjp.training.config import UNAUGMENTED, TrainConfig
from fedmjp.training.trainer import Trainer

LOSS_TOLERANCE = 0.02  # relative; fused attention rounds otherwise in bfloat16


class BareLoop:
    """timm's model, AdamW and cross-entropy under autocast, without anything of this project.

    Args:
        trainer: gives the weights to start from, the recipe, the device and the type of activations.
        fused: whether attention is torch's fused kernel, as timm sets it, or timm's own product of matrices.
    """

    def __init__(self, trainer: Trainer, fused: bool) -> None:
        built, self.device, self.recipe = trainer.model, trainer.device, trainer.recipe
        self.bfloat16 = trainer.config.activations() == "bfloat16"
        self.module = VisionTransformer(
            img_size=built.image_size,
            patch_size=built.patch_size,
            num_classes=len(trainer.data.classes),
            **MODELS.get(built.name).vit,
        )
        self.module.load_state_dict(built.module.state_dict())
        self.module.to(self.device).train()
        for block in self.module.blocks:
            block.attn.fused_attn = fused
        self.mean, self.std = (torch.tensor(v, device=self.device).view(1, -1, 1, 1) for v in (built.mean, built.std))
        rate = trainer.optimizer.param_groups[0]["lr"]
        self.optimizer = create_optimizer_v2(self.module, opt="adamw", lr=rate, weight_decay=self.recipe.weight_decay)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Take one step on images (B, C, H, W) in [0, 1] and labels (B, classes); returns its loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            loss = cross_entropy(self.module((images - self.mean) / self.std), labels)
        self.optimizer.zero_grad()
        loss.backward()
        if self.recipe.clip_gradient:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip_gradient)
        self.optimizer.step()
        return float(loss.detach())


class Bench:
    """One model at one size and batch: a training of this project, and bare loops from the same weights."""

    def __init__(self, options: TrainingSpeedOptions, model: str, image_size: int, batch_size: int) -> None:
        self.device = prepare_torch(options)
        config = TrainConfig(
            model=ModelConfig(model, weights="random", image_size=image_size),
            data=DataConfig(options.data, options.data_path, test_limit=1),
            recipe=dataclasses.replace(UNAUGMENTED, batch_size=batch_size),
            precision=options.precision,
            device=options.device,
            threads=options.threads,
        )
        self.trainer = Trainer(config)
        self.trainer.model.module.train()
        self.draws = Draws.seeded(0, 0)
        self.bare, self.fused = (BareLoop(self.trainer, fused) for fused in (False, True))
        self.batches = self._endless()
        self.clock = time.process_time if self.device.type == "cpu" and options.threads == 1 else time.perf_counter

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in count(1):
            yield from self.trainer.batches.epoch(epoch, self.device)

    def pair(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """Draw one batch and take a step of each loop on it.

        Args:
            number: of the pair; another loop begins in each.

        Returns:
            seconds by column, and the loss of each loop.
        """
        batch: list[Tensor] = []
        seconds = {"load_seconds": self._timed(lambda: batch.extend(next(self.batches)))}
        losses: dict[str, float] = {}
        steps: dict[str, Callable[[], float]] = {
            "ours": lambda: self.trainer.step(*batch, self.draws, 1),
            "bare": lambda: self.bare.step(*batch),
            "fused": lambda: self.fused.step(*batch),
        }
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[f"{name}_seconds"] = self._timed(lambda name=name: losses.update({name: steps[name]()}))
        return seconds, losses

    def _timed(self, work: Callable[[], object]) -> float:
        return timed(work, self.device, self.clock)


def measure(options: TrainingSpeedOptions, model: str, image_size: int, batch_size: int) -> pd.DataFrame:
    """One row a pair.

    Raises:
        Failure: the loops do not train alike.
    """
    bench, rows = Bench(options, model, image_size, batch_size), []
    about = {"model": model, "image_size": image_size, "batch_size": batch_size}
    about |= {"precision": bench.trainer.config.activations()}
    columns = provenance.columns(bench.device)
    machine = {name: columns[name] for name in ("device", "commit")}
    title = f"{model}, {image_size} px, batch {batch_size}"
    for number in track(range(options.warm_up + options.repeats), description=title, transient=True):
        seconds, losses = bench.pair(number)
        if not all(math.isclose(loss, losses["ours"], rel_tol=LOSS_TOLERANCE) for loss in losses.values()):
            raise Failure(f"{title}: the loops do not train alike; losses of step {number + 1}: {losses}")
        if number >= options.warm_up:
            rows.append(about | {"repeat": number - options.warm_up} | seconds | machine)
    return pd.DataFrame(rows)


def run(options: TrainingSpeedOptions, console: Console) -> None:
    """Measure, write and print the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    runs = pd.concat([measure(options, *case) for case in options.cases()])
    write_whole(options.out / "runs.csv", csv(runs, 5).encode())
    TRAINING.write(options.out)
    note_run(
        options.out,
        "python benchmarks/training_speed.py",
        devices=runs["device"],
        commits=runs["commit"],
        overwritten=True,
        images=options.data,
    )
    table = pd.read_csv(options.out / "table.csv")
    console.print(table.round(3).to_string(index=False), highlight=False)
    slowest = table["step_over_bare_median"].max()
    console.print(f"our step / bare timm step: {slowest:.3f} at most (aim: 1.03)", highlight=False)
