"""Clusters of pieces grown from the surest pairs: an arrangement for the jigsaw solver to begin with.

After Gallagher ("Jigsaw puzzles with pieces of unknown orientation", CVPR 2012), without rotations: every pair of
pieces side by side is an edge, the surest edges are taken first, and an edge joins the clusters of its two pieces if
they then do not overlap and still fit the frame. How sure an edge is: its cost less that of the next best pair that has
one of its two pieces on the same side. Departs from it: pieces in known places are one cluster from the start, which
cannot move; there is no trimming, and one cluster alone is kept, that of the known pieces or else the largest. What
becomes of the other pieces is the solver's business.
"""

from __future__ import annotations

import numpy as np

Cells = dict[tuple[int, int], int]  # (row, column) -> piece
STEPS = ((0, 1), (1, 0))  # from a piece to the one to its right, and to the one below it


def best_cluster(right: np.ndarray, below: np.ndarray, grid: tuple[int, int], known: Cells) -> Cells:
    """The cluster of the known pieces, or, without any, the largest, its rows and columns counted from 0.

    Args:
        right, below: (N, N), cost of piece j to the right of, or below, piece i.
        grid: (rows, columns) of the frame.
        known: pieces in their places.
    """
    clusters: dict[int, Cells] = {i: {(0, 0): i} for i in range(len(right))}
    home, place = list(range(len(right))), {i: (0, 0) for i in range(len(right))}
    anchor = min(known.values(), default=-1)
    for cell, piece in known.items():
        clusters.pop(piece)
        home[piece], place[piece] = anchor, cell
    if known:
        clusters[anchor] = dict(known)
    margins = np.stack([_margins(right), _margins(below)])  # (2, N, N)
    for edge in np.argsort(margins, axis=None):
        way, first, second = (int(index) for index in np.unravel_index(edge, margins.shape))
        if home[first] == home[second]:
            continue
        sign = 1
        if home[second] == anchor:  # the known pieces stay
            first, second, sign = second, first, -1
        ours, theirs = clusters[home[first]], clusters[home[second]]
        down, across = (place[first][k] + sign * STEPS[way][k] - place[second][k] for k in range(2))
        moved = {(row + down, column + across): piece for (row, column), piece in theirs.items()}
        if moved.keys() & ours.keys() or not _fits([*ours, *moved], grid, home[first] == anchor):
            continue
        del clusters[home[second]]
        ours |= moved
        for cell, piece in moved.items():
            home[piece], place[piece] = home[first], cell
    if known:
        return clusters[anchor]
    best = max(clusters.values(), key=len)
    top, left = (min(cell[k] for cell in best) for k in range(2))
    return {(row - top, column - left): piece for (row, column), piece in best.items()}


def _margins(costs: np.ndarray) -> np.ndarray:
    """(N, N): each cost less the least other one in its row or column; infinite for a piece beside itself."""
    costs = costs + np.diag(np.full(len(costs), np.inf))
    margins = []
    for axis in (0, 1):
        least = np.sort(costs, axis=axis)
        one, two = np.take(least, [0], axis=axis), np.take(least, [1], axis=axis)
        with np.errstate(invalid="ignore"):  # infinity less infinity, replaced below
            margins.append(costs - np.where(costs == one, two, one))
    return np.where(np.isinf(costs), np.inf, np.maximum(*margins))


def _fits(cells: list[tuple[int, int]], grid: tuple[int, int], anchored: bool) -> bool:
    """Whether cells fit a frame of that size, which begins at row and column 0 where they are anchored."""
    ends = [(min(c[k] for c in cells), max(c[k] for c in cells)) for k in range(2)]
    if anchored:
        return all(low >= 0 and high < side for (low, high), side in zip(ends, grid, strict=True))
    return all(high - low < side for (low, high), side in zip(ends, grid, strict=True))
