"""Jigsaw solver: assigns square pieces to the empty places of a grid by how well their borders continue each other.

Two pieces fit side by side if each continues the other linearly over the border (prediction-based compatibility of
Pomeranz, Shemesh and Ben-Shahar 2011): for the border's inner columns a2, a1 | b1, b2,

    cost = sum over rows and channels  |2 a1 - a2 - b1|^Q + |2 b1 - b2 - a1|^Q,      Q = 0.3.

`attacks.mjp.placement` turns these costs, and what else it knows, into minus logarithms of probabilities. Their sum
over all borders, and over all pieces of what each costs at its place, is minimised over the permutations of the pieces.
Among places of which no two are neighbours, the best permutation of the pieces that lie there is a linear assignment
problem, whatever lies elsewhere. Each move solves one, for a random such set of
places, with noise on its costs that is lowered as moves go on (annealing); at the end, pairs of pieces are exchanged as
long as that helps, neighbours included. Where pieces cost differently at different places, the first start is the best
assignment by these costs alone (Hungarian algorithm). Where every place is empty, all cyclic shifts of the picture are
tried at the end, because borders do not hold it in its frame.

Annealing decides early and rarely moves what fits within itself. So other arrangements are tried beside its own, and
the cheapest one is returned: two by belief propagation (`attacks.mjp.belief_propagation`), whose costs must be minus
logarithms of probabilities, and those that are grown from the surest pairs (`attacks.mjp.piece_clusters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from attacks.mjp.belief_propagation import beliefs
from attacks.mjp.piece_clusters import best_cluster

EXPONENT = 0.3
# Noise at the start, in standard deviations of a border's cost; moves of a restart, by empty places squared, least and
# most.
HEAT, MOVES_A_PAIR, LEAST_MOVES, MOST_MOVES = 1.0, 5, 2_000, 20_000
RESTARTS = 4
SETS, COLD = 100, 0.15  # sets of places to choose from; share of the moves without noise
EQUAL = 1e-9
# Belief propagation: its last beta, an arrangement each; standard deviation of the logarithms of the first messages;
# what is added to beliefs of zero before their logarithm is taken.
LAST_BETAS, START_NOISE, LEAST_BELIEF = (1.5, 2.0), 0.5, 1e-12


@dataclass(frozen=True)
class Costs:
    """Costs of pieces, each (N, N).

    Attributes:
        right, below: piece j to the right of, or below, piece i. What is minimised is minus the logarithm of a
            probability, as belief propagation needs it; a guide of clusters may be in any unit.
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


def solve(
    grid: tuple[int, int],
    costs: Costs,
    masked: Tensor,
    restarts: int = RESTARTS,
    most_moves: int = MOST_MOVES,
    guides: Sequence[Costs] = (),
) -> Tensor:
    """Order the pieces at masked places so that they cost least.

    Args:
        grid: (rows, columns), N places.
        costs: of the N pieces, piece i at place i if it is not masked.
        masked: (N,) bool.
        restarts: of the annealing; the best arrangement is returned.
        most_moves: of a restart.
        guides: costs that clusters are grown by, beside `costs` itself.

    Returns:
        (N,) int64: place i takes piece order[i]; the identity where nothing is masked.
    """
    holes = masked.nonzero()[:, 0].cpu().numpy()
    order = np.arange(len(masked))
    if len(holes) < 2:
        return torch.as_tensor(order, device=masked.device)
    board = _Board(grid, costs)
    rng = np.random.default_rng(0)
    starts = [_Board(grid, guide).assembled(holes) for guide in (costs, *guides)]
    starts += [board.propagated(holes, rng, last_beta) for last_beta in LAST_BETAS]
    best = min((order, *(board.exchanged(start, holes) for start in starts)), key=board.total)
    least = board.total(best)
    for number in range(restarts):
        trial = order.copy()
        trial[holes] = rng.permutation(holes) if number or costs.at is None else board.assigned(holes)
        trial = board.exchanged(board.anneal(trial, holes, rng, most_moves), holes)
        cost = board.total(trial)
        if cost < least:
            best, least = trial, cost
    return torch.as_tensor(best, device=masked.device)


class _Board:
    """A grid, with a place and a piece of number N beyond it that every piece fits.

    Args:
        grid: (rows, columns).
        costs: of the pieces.
    """

    def __init__(self, grid: tuple[int, int], costs: Costs) -> None:
        self.grid, self.size = grid, grid[0] * grid[1]
        right, below = (c.cpu().numpy() for c in (costs.right, costs.below))
        self.right, self.below = (np.pad(c, ((0, 1), (0, 1))) for c in (right, below))
        # Rows that lie together in memory: left[j, i] is what piece i costs to the left of piece j.
        self.left, self.above = self.right.T.copy(), self.below.T.copy()
        at = np.zeros_like(right) if costs.at is None else costs.at.cpu().numpy()
        self.at = np.pad(at, ((0, 0), (0, 1)))
        self.deviation = float(np.concatenate([right, below]).std())
        places = np.pad(np.arange(self.size).reshape(grid), 1, constant_values=self.size)
        around = places[1:-1, :-2], places[1:-1, 2:], places[:-2, 1:-1], places[2:, 1:-1]
        self.around = np.stack(around, axis=-1).reshape(self.size, 4)  # left, right, above, below

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

    def assigned(self, holes: np.ndarray) -> np.ndarray:
        """The pieces of the holes, at the holes in their order, that cost least by their places alone."""
        _, taken = scipy.optimize.linear_sum_assignment(self.at[np.ix_(holes, holes)])
        return holes[taken]

    def propagated(self, holes: np.ndarray, rng: np.random.Generator, last_beta: float) -> np.ndarray:
        """The arrangement of the highest product of beliefs (`attacks.mjp.belief_propagation`)."""
        count, order = len(holes), np.arange(self.size)
        order[holes] = self.size  # what lies there does not count yet
        number = np.full(self.size + 1, count)  # of each place among the holes
        number[holes] = np.arange(count)
        among = np.ix_(holes, holes)
        start = np.exp(START_NOISE * rng.standard_normal((4, count, count)))
        alone, beside = self.fits(order, holes, holes), number[self.around[holes]]
        found = beliefs(self.right[among], self.below[among], alone, beside, start, last_beta)
        _, taken = scipy.optimize.linear_sum_assignment(-np.log(found + LEAST_BELIEF))
        order[holes] = holes[taken]
        return self._framed(order) if count == self.size else order

    def assembled(self, holes: np.ndarray) -> np.ndarray:
        """A cluster of sure pairs (`attacks.mjp.piece_clusters`), and the other pieces where they then cost least.

        Where no piece is in its place, the cluster lies where the whole costs least.
        """
        rows, columns = self.grid
        known = {divmod(int(i), columns): int(i) for i in np.setdiff1d(np.arange(self.size), holes)}
        cells = best_cluster(self.right[:-1, :-1], self.below[:-1, :-1], self.grid, known)
        tall, wide = (1 + max(cell[k] for cell in cells) for k in range(2))
        free = (1, 1) if known else (rows - tall + 1, columns - wide + 1)
        found = []
        for down, across in np.ndindex(free):
            order = np.full(self.size, self.size)
            for (row, column), piece in cells.items():
                order[(row + down) * columns + column + across] = piece
            found.append(self._filled(order))
        return min(found, key=self.total)

    def _filled(self, order: np.ndarray) -> np.ndarray:
        """An arrangement with empty places (the piece of number N), filled with the pieces that are not in it."""
        places = (order == self.size).nonzero()[0]
        pieces = np.setdiff1d(np.arange(self.size), order)
        _, taken = scipy.optimize.linear_sum_assignment(self.fits(order, places, pieces))
        order[places] = pieces[taken]
        return order

    def anneal(self, order: np.ndarray, holes: np.ndarray, rng: np.random.Generator, most_moves: int) -> np.ndarray:
        """Reassign the pieces at random sets of places without neighbours, with falling noise."""
        moves = min(max(MOVES_A_PAIR * len(holes) ** 2, LEAST_MOVES), most_moves)
        sets = [self._apart(rng.permutation(holes)) for _ in range(SETS)]
        for move in range(moves):
            heat = HEAT * self.deviation * max(1 - move / (moves * (1 - COLD)), 0.0)
            order = self._reassigned(order, sets[rng.integers(SETS)], heat, rng)
        if len(holes) < self.size:
            return order
        order = self._framed(order)
        for places in sets:
            order = self._reassigned(order, places, 0.0, rng)
        return order

    def _framed(self, order: np.ndarray) -> np.ndarray:
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

    def _reassigned(self, order: np.ndarray, places: np.ndarray, heat: float, rng: np.random.Generator) -> np.ndarray:
        pieces = order[places]
        costs = self.fits(order, places, pieces)
        if heat:
            costs = costs + heat * rng.standard_normal(costs.shape)
        _, taken = scipy.optimize.linear_sum_assignment(costs)
        order = order.copy()
        order[places] = pieces[taken]
        return order

    def _apart(self, places: np.ndarray) -> np.ndarray:
        """As many of the places, taken in their order, as have no neighbour among those taken."""
        taken = np.zeros(self.size + 1, dtype=bool)
        for at in places:
            taken[at] = not taken[self.around[at]].any()
        return taken[:-1].nonzero()[0]
