"""Gradients of several simulated clients at once, and how they compare with what was received.

A *lane* is one simulated client: one start for one victim. Every distance in use is made of three numbers a parameter,
<R, T>, |R|^2 and |R - T|^2, R the simulated and T the received gradient, both (L, *shape) with a lane a row. |R - T|^2
is computed as it stands: put together from the other two it would drown in round-off near the solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Parameter name -> (L, *shape).
Gradients = Mapping[str, Tensor]


class _Compare(torch.autograd.Function):
    """Both numbers with no more traffic than needed: a gradient of all weights is what a small batch's step costs."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(one, other)
        flat = [t.flatten(1) for t in (one, other)]
        dots = [torch.dot(r, t) for r, t in zip(*flat, strict=True)]
        return torch.stack(dots), torch.stack([torch.dot(r, r) for r in flat[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_dot: Tensor, of_square: Tensor) -> tuple[Tensor, None]:
        one, other = ctx.saved_tensors
        of_dot, of_square = (s.view(-1, *[1] * (one.dim() - 1)) for s in (of_dot, of_square))
        return (2 * of_square * one).addcmul_(of_dot, other), None


def compare(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """<R, T> and |R|^2 of every lane, (L,) each; differentiable once, in R."""
    return _Compare.apply(one, other)


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
