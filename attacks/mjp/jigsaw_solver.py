"""Jigsaw solver: assigns square pieces to the empty places of a grid by how well their borders continue each other.

Two pieces fit side by side if each continues the other linearly over the border (prediction-based compatibility of
Pomeranz, Shemesh and Ben-Shahar 2011): for the border's inner columns a2, a1 | b1, b2,

    cost = sum over rows and channels  |2 a1 - a2 - b1|^Q + |2 b1 - b2 - a1|^Q,      Q = 0.3.

The sum over all borders is minimised over the permutations of the pieces: from several starts, each a linear assignment
of the pieces to the holes by the borders whose other side is filled so far, followed by exchanges of two pieces until
none lowers the cost.
"""

from __future__ import annotations

import scipy.optimize
import torch
from torch import Tensor

from attacks.tokenizer import Tokenizer

EXPONENT = 0.3
RESTARTS = 30


def border_costs(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Cost of piece j to the right of piece i, and of j below i, both (N, N), of pieces (N, C, p, p)."""
    return _facing(pieces), _facing(pieces.transpose(2, 3))


def _facing(pieces: Tensor) -> Tensor:
    inner, edge = pieces[..., -2], pieces[..., -1]  # of the left piece, (N, C, p)
    first, second = pieces[..., 0], pieces[..., 1]  # of the right piece
    onward, back = 2 * edge - inner, 2 * first - second
    rows = []
    for i in range(len(pieces)):
        miss = (onward[i] - first).abs() ** EXPONENT + (back - edge[i]).abs() ** EXPONENT
        rows.append(miss.flatten(1).sum(dim=1))
    return torch.stack(rows)  # (N, N)


def place(tokenizer: Tokenizer, patches: Tensor, masked: Tensor) -> Tensor:
    """Order the pieces at masked places so that all borders fit best.

    Args:
        patches: (N, P), the masked ones in any order, in one unit for all channels.
        masked: (N,) bool.

    Returns:
        (N,) int64: place i takes patch order[i]; the identity where nothing is masked.
    """
    p, channels = tokenizer.patch_size, tokenizer.channels
    right, below = border_costs(patches.reshape(len(patches), channels, p, p))
    holes = masked.nonzero()[:, 0].tolist()
    order = torch.arange(len(patches))
    if len(holes) < 2:
        return order
    board = _Board(tokenizer.grid, right.cpu(), below.cpu())
    generator = torch.Generator().manual_seed(0)
    best, least = order, float("inf")
    for restart in range(RESTARTS):
        trial = board.greedy(order, holes, noise=0.0 if restart == 0 else 0.1, generator=generator)
        trial = board.exchange(trial, holes)
        cost = board.total(trial)
        if cost < least:
            best, least = trial, cost
    return best.to(patches.device)


class _Board:
    """Borders of the grid as a list of (first place, second place, direction)."""

    def __init__(self, grid: tuple[int, int], right: Tensor, below: Tensor) -> None:
        self.costs = torch.stack([right, below])  # (2, N, N)
        rows, columns = grid
        places = torch.arange(rows * columns).view(rows, columns)
        sideways = torch.stack([places[:, :-1].flatten(), places[:, 1:].flatten()], dim=1)
        down = torch.stack([places[:-1].flatten(), places[1:].flatten()], dim=1)
        self.pairs = torch.cat([sideways, down])  # (borders, 2)
        self.kind = torch.cat([torch.zeros(len(sideways)), torch.ones(len(down))]).long()

    def total(self, order: Tensor) -> float:
        """Cost of all borders."""
        return float(self.costs[self.kind, order[self.pairs[:, 0]], order[self.pairs[:, 1]]].sum())

    def hole_costs(self, order: Tensor, holes: list[int], pieces: list[int], filled: Tensor) -> Tensor:
        """Mean border cost (holes, pieces) towards the neighbours that are filled; infinite without any."""
        costs = torch.full((len(holes), len(pieces)), torch.inf, dtype=torch.float64)
        for row, hole in enumerate(holes):
            terms = []
            for (a, b), kind in zip(*self._borders(hole), strict=True):
                if a == hole and filled[b]:
                    terms.append(self.costs[kind][pieces, order[b]])
                elif b == hole and filled[a]:
                    terms.append(self.costs[kind][order[a], pieces])
            if terms:
                costs[row] = torch.stack(terms).mean(dim=0) / len(terms) ** 0.5
        return costs

    def _borders(self, place: int) -> tuple[list[list[int]], list[int]]:
        mine = (self.pairs == place).any(dim=1)
        return self.pairs[mine].tolist(), self.kind[mine].tolist()

    def greedy(self, order: Tensor, holes: list[int], noise: float, generator: torch.Generator) -> Tensor:
        """Fill ring by ring: all holes with a filled neighbour take their pieces in one linear assignment."""
        order, open_, pieces = order.clone(), list(holes), list(holes)
        filled = torch.ones(len(order), dtype=torch.bool)
        filled[open_] = False
        while open_:
            costs = self.hole_costs(order, open_, pieces, filled)
            ready = costs.isfinite().all(dim=1)
            if not ready.any():
                order[open_] = torch.tensor(pieces)
                break
            jitter = 1 + noise * torch.randn(costs.shape, generator=generator, dtype=torch.float64)
            rows = [i for i, is_ready in enumerate(ready.tolist()) if is_ready]
            chosen, taken = scipy.optimize.linear_sum_assignment((costs * jitter)[rows].numpy())
            for i, j in zip(chosen, taken, strict=True):
                order[open_[rows[i]]] = pieces[j]
                filled[open_[rows[i]]] = True
            open_ = [h for h in open_ if not filled[h]]
            pieces = [piece for j, piece in enumerate(pieces) if j not in set(taken.tolist())]
        return order

    def exchange(self, order: Tensor, holes: list[int]) -> Tensor:
        """Exchange two pieces as long as that lowers the cost of the borders."""
        order = order.clone()
        borders = {h: (self.pairs == h).any(dim=1) for h in holes}
        improved = True
        while improved:
            improved = False
            for i, a in enumerate(holes):
                for b in holes[i + 1 :]:
                    near = borders[a] | borders[b]
                    if self._swapped_gain(order, a, b, near) > 1e-9:
                        order[[a, b]] = order[[b, a]]
                        improved = True
        return order

    def _swapped_gain(self, order: Tensor, a: int, b: int, near: Tensor) -> float:
        pairs, kind = self.pairs[near], self.kind[near]
        swapped = order.clone()
        swapped[[a, b]] = swapped[[b, a]]
        before = self.costs[kind, order[pairs[:, 0]], order[pairs[:, 1]]].sum()
        return float(before - self.costs[kind, swapped[pairs[:, 0]], swapped[pairs[:, 1]]].sum())
