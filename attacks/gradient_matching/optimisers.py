"""Optimisers and schedules: parts that an attack composes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


class Schedule(Protocol):
    """The learning rate over a run."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor on the rate at `step` of `steps`."""


@dataclass(frozen=True)
class Constant:
    """The same rate throughout."""

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        return 1.0


@dataclass(frozen=True)
class StepDecay:
    """A tenth of the rate after 3/8, 5/8 and 7/8 of the run (Geiping et al. 2020)."""

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        milestones = [steps // 2.667, steps // 1.6, steps // 1.142]  # as the authors round them
        return 0.1 ** bisect_right(milestones, step)


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine down to zero, after a linear warm-up.

    Args:
        warmup: share of the run.
    """

    warmup: float = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        rising = self.warmup * steps
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


class Optimiser(Protocol):
    """How candidates move.

    Attributes:
        separable: whether lanes that are stacked move as they would alone.
        exact: whether it takes derivatives apart, so that they must be right to round-off.
        schedule: of the rate.
        rate: at its height.
    """

    separable: bool
    exact: bool
    schedule: Schedule
    rate: float

    def make(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The torch optimiser."""

    def direct(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """The gradient as the optimiser is shown it."""

    @property
    def noisy(self) -> bool:
        """Whether `direct` wants noise."""


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015).

    Args:
        signed: show it the gradient's sign only (Geiping et al. 2020).
        langevin: noise on the gradient, in units of the current rate (Yin et al. 2021).
    """

    rate: float = 0.1
    schedule: Schedule = field(default_factory=Constant)
    signed: bool = False
    langevin: float = 0.0
    separable: Literal[True] = True
    exact: Literal[False] = False

    def make(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """See `Optimiser`."""
        return torch.optim.Adam(variables, lr=self.rate)

    def direct(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """See `Optimiser`."""
        if noise is not None:
            gradient = gradient + self.langevin * rate * noise
        return gradient.sign() if self.signed else gradient

    @property
    def noisy(self) -> bool:
        """See `Optimiser`."""
        return self.langevin > 0


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS without line search, one evaluation a step, as the authors of Deep Leakage from Gradients run it."""

    rate: float = 1.0
    schedule: Schedule = field(default_factory=Constant)
    separable: Literal[False] = False
    exact: Literal[True] = True

    def make(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """See `Optimiser`. Gradients of gradients are small: only an exact zero stops it."""
        return torch.optim.LBFGS(variables, lr=self.rate, max_iter=1, tolerance_grad=0.0, tolerance_change=0.0)

    def direct(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """See `Optimiser`."""
        return gradient

    @property
    def noisy(self) -> bool:
        """See `Optimiser`."""
        return False
