"""Central training on a client's loss, epoch by epoch.

A step computes the same as a client (`fedmjp.client`): the objective's view of the batch, the defence on the input, the
loss, its gradient, the defence on the update. Instead of being sent, the update is passed to an optimiser.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor

from attacks import UsageError
from fedmjp.data import DataBundle, load_data
from fedmjp.defenses import Defense
from fedmjp.defenses.privacy import Schedule
from fedmjp.devices import usable_device, use_threads
from fedmjp.models.vit import drop_activations, skip_blocks
from fedmjp.objectives import Draws, Learner
from fedmjp.training.batches import Batches
from fedmjp.training.config import TrainConfig

TIMM_NAMES = {"sgd": "momentum"}  # timm's own "sgd" takes Nesterov's step
LAST_RATE = 0.01  # last learning rate of the cosine schedule in units of its peak; DeiT's 1e-5


class Trainer:
    """Model, data and optimiser of one training.

    Args:
        config: all options.
        data: the data that `config` names, if it is loaded already.

    Raises:
        UsageError: options, data, weights or device cannot be used.
    """

    def __init__(self, config: TrainConfig, data: DataBundle | None = None) -> None:
        config.validate()
        self.config, self.recipe, self.defense = config, config.recipe, config.defence()
        self.device = usable_device(config.device)
        use_threads(config.threads)
        self.data = load(config) if data is None else data
        if config.chosen_objective().needs_labels:
            self.data.require_labels(f"--objective {config.objective}")
        self.defense = self.defense.scheduled(self.privacy_schedule)
        self.learner = build_learner(config, self.defense, len(self.data.classes), self.device)
        self.model = self.learner.model
        self.memory: dict[str, Tensor] = {}  # what the defence remembers from step to step
        if config.start.drop_path:
            skip_blocks(self.model.module, config.start.drop_path)
        if config.start.dropout:
            drop_activations(self.model.module, config.start.dropout)
        if self.device.type == "cpu":
            _use_unfused_attention(self.model.module)
            self.learner.begin()  # a teacher computes as its student does, from the first step as after a resumption
        self.data.test.keep()  # every epoch ends with an evaluation
        self.batches = Batches(self.data.train, self.recipe, self.model, config.seed, config.workers)
        rate = self.recipe.learning_rate * self.recipe.batch_size / 512
        decay = config.start.layer_decay
        own = {"sgd": {"momentum": self.recipe.momentum}, "muon": {"nesterov": True}}
        self.optimizer = create_optimizer_v2(
            self.model.module,
            opt=TIMM_NAMES.get(self.recipe.optimizer, self.recipe.optimizer),
            lr=rate,
            weight_decay=self.recipe.weight_decay,
            layer_decay=None if decay == 1 else decay,
            **own.get(self.recipe.optimizer, {}),
        )
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=self.recipe.epochs * len(self.batches),
            lr_min=rate * LAST_RATE,
            warmup_t=round(self.recipe.warmup_epochs * len(self.batches)),
            warmup_lr_init=rate * LAST_RATE,
            t_in_epochs=False,
        )

    @property
    def privacy_schedule(self) -> Schedule:
        """How often the training uses each image; repeated augmentation puts its copies into one batch."""
        recipe, images = self.recipe, len(self.data.train)
        return Schedule(
            images, recipe.batch_size, recipe.epochs * (images // recipe.batch_size), recipe.epochs * recipe.repeats**2
        )

    def epoch(self, number: int, on_step: Callable[[float], None]) -> dict[str, float]:
        """Train epoch `number` (from 1) and evaluate.

        Args:
            number: of the epoch.
            on_step: called with each step's loss.

        Returns:
            The record for the history: epoch, steps, rate (of the last step), train_loss, test_loss, test_accuracy in
            [0, 1] (of what `Objective.accuracy_of` names), test_images, train_seconds and images_per_second (without
            evaluation).

        Raises:
            UsageError: the loss is no longer finite.
        """
        self.model.module.train()
        draws = Draws.seeded(self._entropy(5, number), self._entropy(6, number))
        start, losses = time.perf_counter(), []
        for index, (images, labels) in enumerate(self.batches.epoch(number, self.device)):
            done = (number - 1) * len(self.batches) + index
            self.schedule.step_update(done)
            progress = done / (self.recipe.epochs * len(self.batches))
            known = labels if self.data.labelled else None
            losses.append(self.step(images, known, draws, number, progress))
            on_step(losses[-1])
        seconds = time.perf_counter() - start
        learner = self.learner
        test_loss, accuracy = learner.objective.evaluate(self.model, learner.local, self.data, self.device)
        return {
            "epoch": number,
            "steps": len(losses),
            "rate": max(group["lr"] for group in self.optimizer.param_groups),
            "train_loss": sum(losses) / len(losses),
            "test_loss": test_loss,
            "test_accuracy": accuracy,
            "test_images": len(self.data.test),
            "train_seconds": seconds,
            "images_per_second": len(losses) * self.recipe.batch_size / seconds,
        }

    def step(self, images: Tensor, labels: Tensor | None, draws: Draws, epoch: int, progress: float = 0.0) -> float:
        """Take one step on a batch; returns its loss.

        Args:
            images: (B, C, H, W) in [0, 1], on the trainer's device.
            labels: (B,) int64, or (B, classes) probabilities; None where the objective needs none.
            draws: the random numbers of defence and objective.
            epoch: number of the epoch, from 1.
            progress: share of the training that is done, in [0, 1).

        Raises:
            UsageError: the loss is not finite.
        """
        views = self.learner.views(images, draws, epoch)
        local = self.learner.step(views, labels, draws, progress, self._autocast)
        update = self.defense.gradients(local, draws.defense)  # computes the loss as the defence needs it
        if not torch.isfinite(local.loss):
            raise UsageError(f"the loss is {float(local.loss.detach())} in epoch {epoch}; lower --learning-rate")
        update, self.memory = self.defense.message(update, draws.defense, self.memory)
        for name, parameter in local.trained.items():
            parameter.grad = None if name in local.unused else update[name]
        if self.recipe.clip_gradient:
            torch.nn.utils.clip_grad_norm_(local.trained.values(), self.recipe.clip_gradient)
        self.optimizer.step()
        self.learner.after_step(progress)
        return float(local.loss.detach())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.activations() == "bfloat16")

    def state(self) -> dict[str, Any]:
        """State to resume from after an epoch; schedule and random numbers are determined by the epoch's number."""
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "kept": self.learner.kept(), "memory": self.memory}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.learner.begin(state["kept"])
        self.memory = state["memory"]

    def _entropy(self, purpose: int, epoch: int) -> int:
        """Seed of the random numbers for one purpose in one epoch."""
        sequence = np.random.SeedSequence([self.config.seed, purpose, epoch])
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def build_learner(
    config: TrainConfig, defense: Defense, num_classes: int, device: torch.device, weights: str | None = None
) -> Learner:
    """The model of a training under its objective and defence.

    Args:
        weights: instead of those, or of the encoder, that the configuration names.

    Raises:
        UsageError: see `Learner.build`.
    """
    model = config.model if weights is None else dataclasses.replace(config.model, weights=weights)
    return Learner.build(
        config.chosen_objective(),
        defense,
        model,
        num_classes=num_classes,
        seed=config.seed,
        device=device,
        encoder=config.start.checkpoint if weights is None else None,
    )


def load(config: TrainConfig) -> DataBundle:
    """Load the images that a training's configuration names, at the size of its model.

    Raises:
        UsageError: see `load_data`.
    """
    data = config.data
    return load_data(
        data.data,
        size=config.model.side(),
        path=data.data_path,
        train_limit=data.train_limit,
        test_limit=data.test_limit,
        seed=config.seed,
    )


def _use_unfused_attention(module: torch.nn.Module) -> None:
    """Switch timm to unfused attention, because torch's fused kernel takes half of a CPU's training step.

    Measured on 64 tokens in bfloat16: 4.9 ms an image against 8.4 ms, forward and backward.
    """
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
