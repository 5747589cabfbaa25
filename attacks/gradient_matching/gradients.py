"""Gradients of several simulated clients at once, and their comparison with the received gradients.

There is one simulated client per search, that is per victim and restart; L counts them. All distances in use are
computed from three numbers per parameter, <R, T>, |R|^2 and |R - T|^2, where R is the simulated and T the received
gradient, both (L, *shape) with one simulated client per row. |R - T|^2 is computed directly: computed from the other
two numbers it would be lost in round-off near the solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Parameter name -> (L, *shape).
Gradients = Mapping[str, Tensor]


class _DotAndSquare(torch.autograd.Function):
    """<R, T> and |R|^2: on a CPU with as few memory accesses as possible, elsewhere with as few operations.

    With a small batch, reading the gradient of all weights is the largest cost of a step on a CPU. A GPU waits for the
    start of each operation instead (NVIDIA H100, `vit_mini_32`: 64 dot products a parameter made a step take 894 ms,
    sums over all of them 108 ms).
    """

    @staticmethod
    def forward(ctx: Any, simulated: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        """<R, T> and |R|^2, each (L,), of R and T (L, *shape)."""
        ctx.save_for_backward(simulated, received)
        found, given = simulated.flatten(1), received.flatten(1)
        if found.device.type != "cpu":
            return (found * given).sum(dim=1), found.square().sum(dim=1)
        dots = [torch.dot(r, t) for r, t in zip(found, given, strict=True)]
        return torch.stack(dots), torch.stack([torch.dot(r, r) for r in found])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_dot: Tensor, of_square: Tensor) -> tuple[Tensor, None]:
        """Derivative by R (L, *shape), from those by the two outputs (L,)."""
        simulated, received = ctx.saved_tensors
        of_dot, of_square = (s.view(-1, *[1] * (simulated.dim() - 1)) for s in (of_dot, of_square))
        return (2 * of_square * simulated).addcmul_(of_dot, received), None


def dot_and_square(simulated: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
    """<R, T> and |R|^2 per simulated client; differentiable once, with respect to R.

    Args:
        simulated: R, (L, *shape).
        received: T, (L, *shape).

    Returns:
        Two tensors (L,).
    """
    return _DotAndSquare.apply(simulated, received)


def squared_norm(gradient: Tensor) -> Tensor:
    """|R|^2 per simulated client: (L, *shape) -> (L,)."""
    return gradient.flatten(1).square().sum(dim=1)


@dataclass(frozen=True)
class Target:
    """The received gradients, one row per simulated client.

    Attributes:
        values: parameter name -> (L, *shape).
        squares: parameter name -> |T|^2, (L,).
        sent: parameter name -> (L, *shape) bool, the entries that are matched; None for all.
    """

    values: Gradients
    squares: Mapping[str, Tensor]
    sent: Mapping[str, Tensor] | None = None

    @classmethod
    def of(cls, values: Gradients) -> Target:
        """The target of received gradients `values`, name -> (L, *shape)."""
        return cls(values, {name: squared_norm(t) for name, t in values.items()})

    def of_sent(self) -> Target:
        """The same target for a sparse message: entries that are exactly zero were not sent, and are not matched."""
        return replace(self, sent={name: t != 0 for name, t in self.values.items()})

    def matched(self, found: Gradients) -> Gradients:
        """Simulated gradients, name -> (L, *shape), with zeros at the entries that are not matched."""
        return found if self.sent is None else {name: r * self.sent[name] for name, r in found.items()}

    def total(self) -> Tensor:
        """|T|^2 over all parameters, (L,)."""
        return torch.stack(list(self.squares.values())).sum(dim=0)
