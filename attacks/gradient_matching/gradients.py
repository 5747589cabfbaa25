"""Gradients of several simulated clients at once, and how they compare with what was received.

A *lane* is one simulated client: one start for one victim. Every distance in use is made of three numbers a parameter,
<R, T>, |R|^2 and |R - T|^2, R the simulated and T the received gradient, both (L, *shape) with a lane a row. |R - T|^2
is computed as it stands: put together from the other two it would drown in round-off near the solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Parameter name -> (L, *shape).
Gradients = Mapping[str, Tensor]


def dot(one: Tensor, other: Tensor) -> Tensor:
    """<R, T> of every lane, (L,)."""
    return (one * other).flatten(1).sum(dim=1)


def square(one: Tensor) -> Tensor:
    """|R|^2 of every lane, (L,)."""
    return one.flatten(1).square().sum(dim=1)


@dataclass(frozen=True)
class Target:
    """What the victims sent, a lane a row.

    Attributes:
        values: parameter name -> (L, *shape).
        squares: parameter name -> |T|^2, (L,).
    """

    values: Gradients
    squares: Mapping[str, Tensor]

    @classmethod
    def of(cls, values: Gradients) -> Target:
        """Stack of received gradients, (L, *shape) by name."""
        return cls(values, {name: square(t) for name, t in values.items()})

    def total(self) -> Tensor:
        """|T|^2 over all parameters, (L,)."""
        return torch.stack(list(self.squares.values())).sum(dim=0)
