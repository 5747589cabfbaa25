"""Local optima of the search for tokens: which of them are tokens, and which repeat others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A start has found a token where its squared residual is at most FOUND times what the noise of the message explains
# there, and OWN of its inputs' squared length (round-off of a token whose gradient dominates the sums). Ratios at true
# tokens are 0.7 to 2, up to 20 on photographs with flat areas; where a start has not converged, 500 and more, in flat
# areas from 2 on: there it lies between patches that hardly differ.
FOUND, OWN = 10.0, 1e-12
# Two of them are one token where the squared residual rises by less than this share of itself from one to the other.
SAME = 0.2


@dataclass(frozen=True)
class Optima:
    """Local optima.

    Attributes:
        y: (S, D) tokens at the second norm, up to a factor and a constant: mean 0, length D^1/2 (unless the scale of
            the starts is kept).
        losses: (S,) squared residuals. explained: (S,) of them, what the noise of the message explains.
    """

    y: Tensor
    losses: Tensor
    explained: Tensor

    def __getitem__(self, index: Tensor | list[int] | slice) -> Optima:
        return Optima(self.y[index], self.losses[index], self.explained[index])

    def __len__(self) -> int:
        return len(self.y)

    @property
    def found(self) -> Tensor:
        """(S,) bool, those that are tokens."""
        return self.losses <= FOUND * self.explained

    @property
    def ratios(self) -> Tensor:
        """(S,) squared residuals over what the noise of the message explains."""
        return self.losses / self.explained

    def replaced(self, index: Tensor, other: Optima) -> Optima:
        """With others at these indices (S,)."""
        return Optima(*(getattr(self, n).index_put((index,), getattr(other, n)) for n in Optima.__dataclass_fields__))

    def joined(self, other: Optima) -> Optima:
        """These and others."""
        return Optima(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in Optima.__dataclass_fields__))


def repeated(
    points: Tensor, losses: Tensor, matrices: Tensor, before: int = 0, apart: Tensor | None = None
) -> list[int]:
    """Indices among the points (S, m) after the first `before` ones of those that repeat none before them.

    Args:
        points: coordinates, the later ones by rising losses (S,), squared residuals.
        matrices: (S - before, m, m), Gauss-Newton matrices of the later ones.
        apart: (S, S) bool, pairs that may differ; by default all.
    """
    kept = list(range(before))
    for i in range(before, len(points)):
        along = points[kept] - points[i]  # (n, m)
        rise = ((along @ matrices[i - before]) * along).sum(dim=1)
        same = rise < SAME * (losses[i] + losses[kept])
        if apart is not None:
            same = same | ~apart[i, kept]
        if not same.any():
            kept.append(i)
    return [i - before for i in kept[before:]]
