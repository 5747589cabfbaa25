"""Jigsaw solver: assigns square pieces to the empty places of a grid by how well their borders continue each other.

Two pieces fit side by side if each continues the other linearly over the border (prediction-based compatibility of
Pomeranz, Shemesh and Ben-Shahar 2011): for the border's inner columns a2, a1 | b1, b2,

    cost = sum over rows and channels  |2 a1 - a2 - b1|^Q + |2 b1 - b2 - a1|^Q,      Q = 0.3.

`attacks.mjp.placement` turns these costs, and what else it knows, into minus logarithms of probabilities. Their sum
over all borders, and over all pieces of what each costs at its place, is minimised over the permutations of the pieces:
belief propagation (`attacks.mjp.belief_propagation`) proposes arrangements, in each of them two pieces are exchanged as
long as that lowers the cost, and the cheapest one is returned. Proposals differ in

- beta at the end of the propagation (`LAST_BETAS`);
- a perturbation of the costs, once every beta was tried;
- where every place is empty, half of them have an *anchor*. Without known pieces, parts of the picture form in several
  regions of the grid at once, shifted against each other, and meet in seams that nothing moves. So one piece whose
  neighbours are sure is fixed and everything else grows from it, on a torus (the last column lies beside the first one)
  and without the costs of places, so that nothing but the anchor tells places apart. Then all cyclic shifts are tried
  with all costs. Each such proposal has another anchor.

It ends early when `AGREEMENT` proposals have led to the cheapest arrangement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from attacks.mjp.belief_propagation import beliefs

EXPONENT = 0.3
RESTARTS = 48
LAST_BETAS, AGREEMENT = (1.5, 2.0, 1.0, 3.0), 6
PERTURBATION = 0.3  # standard deviation, of minus the logarithm of a probability
ANCHORS = 16  # anchors are taken at steps of a sixteenth of the pieces, the surest first
START_NOISE = 0.5  # standard deviation of the logarithms of the first messages
LEAST_BELIEF = 1e-12  # added to beliefs before their logarithm is taken
EQUAL = 1e-9


@dataclass(frozen=True)
class Costs:
    """Costs of pieces, each (N, N).

    Attributes:
        right, below: minus the logarithm of the probability of piece j to the right of, or below, piece i; of
            `border_costs`, in a unit of their own.
        at: piece j at place i, or None where pieces cost the same at every place.
    """

    right: Tensor
    below: Tensor
    at: Tensor | None = None


def border_costs(pieces: Tensor) -> Costs:
    """The costs of the borders of pieces (N, C, p, p)."""
    return Costs(_facing(pieces), _facing(pieces.transpose(2, 3)))


def _facing(pieces: Tensor) -> Tensor:
    inner, edge = pieces[..., -2], pieces[..., -1]  # of the left piece, (N, C, p)
    first, second = pieces[..., 0], pieces[..., 1]  # of the right piece
    onward, back = 2 * edge - inner, 2 * first - second
    rows = []
    for i in range(len(pieces)):
        miss = (onward[i] - first).abs() ** EXPONENT + (back - edge[i]).abs() ** EXPONENT
        rows.append(miss.flatten(1).sum(dim=1))
    return torch.stack(rows)  # (N, N)


def solve(grid: tuple[int, int], costs: Costs, masked: Tensor, restarts: int = RESTARTS) -> Tensor:
    """Order the pieces at masked places so that they cost least.

    Args:
        grid: (rows, columns), N places.
        costs: of the N pieces, piece i at place i if it is not masked.
        masked: (N,) bool.
        restarts: most arrangements that are proposed; the best one is returned.

    Returns:
        (N,) int64: place i takes piece order[i]; the identity where nothing is masked.
    """
    holes = masked.nonzero()[:, 0].cpu().numpy()
    best = np.arange(len(masked))
    if len(holes) < 2:
        return torch.as_tensor(best, device=masked.device)
    board = _Board(grid, costs)
    least, agreeing = board.total(best), 0
    for proposal in _proposals(board, holes, restarts):
        found = board.exchanged(proposal, holes)
        cost = board.total(found)
        same = abs(cost - least) <= EQUAL * abs(least)
        agreeing = agreeing + 1 if same else 1 if cost < least else agreeing
        if cost < least:
            best, least = found, cost
        if agreeing == AGREEMENT:
            break
    return torch.as_tensor(best, device=masked.device)


def _proposals(board: _Board, holes: np.ndarray, restarts: int) -> Iterator[np.ndarray]:
    """Arrangements by belief propagation; see the module."""
    rng, scrambled = np.random.default_rng(0), len(holes) == board.size
    torus = board.without_places() if scrambled else None
    for number in range(restarts):
        turn, anchored = (number // 2, number % 2 == 0) if scrambled else (number, False)
        last_beta = LAST_BETAS[turn % len(LAST_BETAS)]
        if anchored:
            order = torus.grown(torus.anchor(turn), last_beta)
        else:
            source = board if turn < len(LAST_BETAS) else board.perturbed(rng)
            known = np.arange(board.size)
            known[holes] = board.size
            start = np.exp(START_NOISE * rng.standard_normal((4, len(holes), len(holes))))
            order = source.propagated(known, start, last_beta)
        yield board.framed(order) if scrambled else order


class _Board:
    """A grid, with a place and a piece of number N beyond it that every piece fits.

    Args:
        grid: (rows, columns).
        costs: of the pieces.
        torus: whether the first and the last of more than two rows or columns lie side by side.
    """

    def __init__(self, grid: tuple[int, int], costs: Costs, torus: bool = False) -> None:
        self.grid, self.size, self.costs = grid, grid[0] * grid[1], costs
        self.right, self.below = (np.pad(c.cpu().numpy(), ((0, 1), (0, 1))) for c in (costs.right, costs.below))
        # Rows that lie together in memory: left[j, i] is what piece i costs to the left of piece j.
        self.left, self.above = self.right.T.copy(), self.below.T.copy()
        at = np.zeros_like(costs.right.cpu()) if costs.at is None else costs.at.cpu().numpy()
        self.at = np.pad(at, ((0, 0), (0, 1)))
        places = np.arange(self.size).reshape(grid)
        for axis in (0, 1):
            beyond = {"mode": "wrap"} if torus and grid[axis] > 2 else {"constant_values": self.size}
            places = np.pad(places, [(int(axis == other),) * 2 for other in (0, 1)], **beyond)
        around = places[1:-1, :-2], places[1:-1, 2:], places[:-2, 1:-1], places[2:, 1:-1]
        self.around = np.stack(around, axis=-1).reshape(self.size, 4)  # left, right, above, below

    def without_places(self) -> _Board:
        """The same pieces on a torus, at no cost of their places."""
        return _Board(self.grid, replace(self.costs, at=None), torus=True)

    def perturbed(self, rng: np.random.Generator) -> _Board:
        """The same with noise on the costs of neighbours."""
        right, below = (
            cost + PERTURBATION * torch.as_tensor(rng.standard_normal(cost.shape)).to(cost)
            for cost in (self.costs.right, self.costs.below)
        )
        return _Board(self.grid, replace(self.costs, right=right, below=below))

    def total(self, order: np.ndarray) -> float:
        """Cost of all borders, and of all pieces at their places."""
        pieces = np.append(order, self.size)
        sideways = self.right[order, pieces[self.around[:, 1]]]
        placed = self.at[np.arange(self.size), order]
        return float(sideways.sum() + self.below[order, pieces[self.around[:, 3]]].sum() + placed.sum())

    def fits(self, order: np.ndarray, places: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Cost of each place with each piece there, (places, pieces), the neighbours as they lie."""
        left, right, above, under = np.append(order, self.size).take(self.around.take(places, axis=0).T)
        # Adding whole rows and picking the pieces once is faster than picking them from each table.
        costs = self.right.take(left, axis=0)
        costs += self.left.take(right, axis=0)
        costs += self.at.take(places, axis=0)
        costs += self.below.take(above, axis=0)
        costs += self.above.take(under, axis=0)
        return costs.take(pieces, axis=1)

    def anchor(self, turn: int) -> int:
        """A piece whose best neighbours cost little, another one every turn."""
        pairs = [table[:-1, :-1] + np.diag(np.full(self.size, np.inf)) for table in (self.right, self.below)]
        best = sum(table.min(axis=axis) for table in pairs for axis in (0, 1))
        return int(np.argsort(best)[turn * max(self.size // ANCHORS, 1) % self.size])

    def grown(self, anchor: int, last_beta: float) -> np.ndarray:
        """The arrangement that is propagated from one piece in the middle."""
        order = np.full(self.size, self.size)
        order[self.size // 2] = anchor
        return self.propagated(order, np.ones((4, self.size - 1, self.size - 1)), last_beta)

    def propagated(self, order: np.ndarray, start: np.ndarray, last_beta: float) -> np.ndarray:
        """The arrangement of the highest product of beliefs (`attacks.mjp.belief_propagation`).

        Args:
            order: (N,) the piece at each place, N where none is known.
            start: (4, M, M), the first messages of the M empty places.
            last_beta: see `beliefs`.
        """
        places = (order == self.size).nonzero()[0]
        pieces, count = np.setdiff1d(np.arange(self.size), order), len(places)
        number = np.full(self.size + 1, count)  # of each place among the empty ones
        number[places] = np.arange(count)
        among = np.ix_(pieces, pieces)
        alone, beside = self.fits(order, places, pieces), number[self.around[places]]
        found = beliefs(self.right[among], self.below[among], alone, beside, start, last_beta)
        _, taken = scipy.optimize.linear_sum_assignment(-np.log(found + LEAST_BELIEF))
        order = order.copy()
        order[places] = pieces[taken]
        return order

    def framed(self, order: np.ndarray) -> np.ndarray:
        """The cyclic shift of an arrangement that costs least."""
        table, (rows, columns) = order.reshape(self.grid), self.grid
        shifts = [np.roll(table, (i, j), (0, 1)).reshape(-1) for i in range(rows) for j in range(columns)]
        return min(shifts, key=self.total)

    def exchanged(self, order: np.ndarray, holes: np.ndarray) -> np.ndarray:
        """Exchange two pieces, neighbours included, as long as that lowers the cost."""
        order, least, improved = order.copy(), self.total(order), True
        first, second = (holes[i] for i in np.triu_indices(len(holes), 1))
        touching = (self.around[first] == second[:, None]).any(axis=1)
        while improved:
            improved, start = False, 0
            while start < len(first):
                # What two pieces that do not touch cost where they lie, and where the other one lies.
                fits = self.fits(order, np.arange(self.size), order)
                own = fits.diagonal()
                risen = fits[first, second] + fits[second, first] - own[first] - own[second]
                likely = (touching | (risen < -EQUAL * least))[start:].nonzero()[0] + start
                start = len(first)
                for pair in likely:
                    both, turned = [first[pair], second[pair]], [second[pair], first[pair]]
                    order[both] = order[turned]
                    cost = self.total(order)
                    if cost < least * (1 - EQUAL):
                        least, improved, start = cost, True, pair + 1
                        break
                    order[both] = order[turned]
        return order
