"""The gradient of one parameter for several simulated clients at once, and how it compares with what was received.

A *lane* is one simulated client: one start for one victim. Every distance in use is made of three numbers a parameter,
<R, T>, |R|^2 and |R - T|^2, R the simulated and T the received gradient. For a linear layer, R = D^T X with D the
gradients at its outputs and X its inputs, a row a token, and the first two need no R:

    <D^T X, T> = sum of (D T) * X,      |D^T X|^2 = sum of (D D^T) * (X X^T),

which costs less than R where there are fewer tokens than channels, and stores no gradient. |R - T|^2 is computed from R
itself: as a difference of the other two it would drown in round-off near the solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Part(Protocol):
    """One parameter's simulated gradient R, a lane a row."""

    def dot(self, target: Tensor) -> Tensor:
        """<R, T> for T (L, *shape); (L,)."""

    def square(self) -> Tensor:
        """|R|^2, (L,)."""

    def gap(self, target: Tensor) -> Tensor:
        """|R - T|^2 for T (L, *shape), (L,)."""


@dataclass(frozen=True)
class Value:
    """A gradient at hand, (L, *shape)."""

    value: Tensor

    def dot(self, target: Tensor) -> Tensor:
        """See `Part`."""
        return (self.value * target).flatten(1).sum(dim=1)

    def square(self) -> Tensor:
        """See `Part`."""
        return self.value.flatten(1).square().sum(dim=1)

    def gap(self, target: Tensor) -> Tensor:
        """See `Part`."""
        return (self.value - target).flatten(1).square().sum(dim=1)


@dataclass(frozen=True)
class Product:
    """A linear layer's weight gradient, outputs^T inputs.

    Attributes:
        outputs: D, (L, T, out), the loss's gradient at the layer's output.
        inputs: X, (L, T, in).
    """

    outputs: Tensor
    inputs: Tensor

    @cached_property
    def _value(self) -> Tensor:
        return self.outputs.mT @ self.inputs  # (L, out, in)

    @property
    def _few(self) -> bool:
        return self.outputs.shape[1] <= min(self.outputs.shape[2], self.inputs.shape[2])

    def dot(self, target: Tensor) -> Tensor:
        """See `Part`; T may have more dimensions (a convolution's kernel)."""
        target = target.flatten(2)
        if self._few:
            return ((self.outputs @ target) * self.inputs).sum(dim=(1, 2))
        return (self._value * target).sum(dim=(1, 2))

    def square(self) -> Tensor:
        """See `Part`."""
        if self._few:
            return ((self.outputs @ self.outputs.mT) * (self.inputs @ self.inputs.mT)).sum(dim=(1, 2))
        return self._value.square().sum(dim=(1, 2))

    def gap(self, target: Tensor) -> Tensor:
        """See `Part`."""
        return (self._value - target.flatten(2)).square().sum(dim=(1, 2))


Parts = Mapping[str, Part]


@dataclass(frozen=True)
class Target:
    """What the victims sent, a lane a row.

    Attributes:
        values: parameter name -> (L, *shape).
        squares: parameter name -> |T|^2, (L,).
    """

    values: Mapping[str, Tensor]
    squares: Mapping[str, Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Tensor]) -> Target:
        """Stack of received gradients, (L, *shape) by name."""
        return cls(values, {name: t.flatten(1).square().sum(dim=1) for name, t in values.items()})

    def total(self) -> Tensor:
        """|T|^2 over all parameters, (L,)."""
        return torch.stack(list(self.squares.values())).sum(dim=0)
