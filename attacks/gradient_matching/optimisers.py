"""Optimisers and learning-rate schedules: parts that an attack composes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


class Schedule(Protocol):
    """The learning rate over the steps of a run."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor on the learning rate, in [0, 1], at `step` (from 0) of `steps`."""


@dataclass(frozen=True)
class Constant:
    """A constant learning rate."""

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        return 1.0


@dataclass(frozen=True)
class StepDecay:
    """Divides the rate by ten after 3/8, 5/8 and 7/8 of the run (Geiping et al. 2020)."""

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        milestones = [steps // 2.667, steps // 1.6, steps // 1.142]  # rounded as in the authors' code
        return 0.1 ** bisect_right(milestones, step)


@dataclass(frozen=True)
class CosineDecay:
    """Cosine decay to zero, after a linear warm-up.

    Args:
        warmup: length of the warm-up as a share of the run, in [0, 1).
    """

    warmup: float = 0.0

    def __call__(self, step: int, steps: int) -> float:
        """See `Schedule`."""
        rising = self.warmup * steps
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


class Optimiser(Protocol):
    """Updates the candidates.

    Attributes:
        separable: whether searches stacked into one tensor take the same steps as they would take alone.
        exact: whether it needs derivatives that are exact to round-off, because it takes differences of them.
        schedule: of the learning rate.
        rate: the largest learning rate.
    """

    separable: bool
    exact: bool
    schedule: Schedule
    rate: float

    def build(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The torch optimiser over `variables`."""

    def transform_gradient(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """The gradient that the torch optimiser receives, of the same shape.

        Args:
            gradient: derivative of the loss.
            noise: unit Gaussian, of the gradient's shape; None if `uses_noise` is False.
            rate: the current learning rate.
        """

    @property
    def uses_noise(self) -> bool:
        """Whether `transform_gradient` needs noise."""


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015).

    Args:
        rate: the largest learning rate.
        schedule: of the learning rate.
        signed: pass on only the sign of the gradient (Geiping et al. 2020).
        langevin: standard deviation of the noise on the gradient, in units of the current rate (Yin et al. 2021).
    """

    rate: float = 0.1
    schedule: Schedule = field(default_factory=Constant)
    signed: bool = False
    langevin: float = 0.0
    separable: Literal[True] = True
    exact: Literal[False] = False

    def build(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """See `Optimiser`."""
        return torch.optim.Adam(variables, lr=self.rate)

    def transform_gradient(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """See `Optimiser`."""
        if noise is not None:
            gradient = gradient + self.langevin * rate * noise
        return gradient.sign() if self.signed else gradient

    @property
    def uses_noise(self) -> bool:
        """See `Optimiser`."""
        return self.langevin > 0


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS without line search, one evaluation per step, as the authors of Deep Leakage from Gradients run it.

    Args:
        rate: length of a quasi-Newton step.
        schedule: of the rate.
    """

    rate: float = 1.0
    schedule: Schedule = field(default_factory=Constant)
    separable: Literal[False] = False
    exact: Literal[True] = True

    def build(self, variables: Sequence[Tensor]) -> torch.optim.Optimizer:
        """See `Optimiser`. Only a gradient of exactly zero stops it, because gradients of gradients are small."""
        return torch.optim.LBFGS(variables, lr=self.rate, max_iter=1, tolerance_grad=0.0, tolerance_change=0.0)

    def transform_gradient(self, gradient: Tensor, noise: Tensor | None, rate: float) -> Tensor:
        """See `Optimiser`."""
        return gradient

    @property
    def uses_noise(self) -> bool:
        """See `Optimiser`."""
        return False
