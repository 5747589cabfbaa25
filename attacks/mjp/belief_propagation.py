"""Belief propagation for the jigsaw solver: how likely each piece is at each empty place, whatever lies elsewhere.

A place's belief in a piece is the product of the piece's own probability there and of one message from each side. The
message of a neighbour is what it believes without this place, summed over its pieces with the probability of the pair:

    b_p(i) ~ exp(-beta A_pi) prod over sides s of m_s(i),      m_s(i) ~ sum_j exp(-beta R_ji) b_q\\p(j).

So a place may waver between arrangements, where annealing (`attacks.mjp.jigsaw_solver`) has to choose one and rarely
leaves it: where pairs are uncertain, clusters that fit within themselves lie in wrong places, and no exchange of single
pieces moves them. After Cho, Avidan and Freeman ("A probabilistic image jigsaw puzzle", CVPR 2010). Departs from it:

- beta rises while messages are passed, from flat beliefs to decided ones;
- that every piece lies somewhere once is not a factor but a weight of each piece, lowered while the beliefs in it sum
  to more than one place;
- pieces in known places are constants, and no anchors are drawn where there are none;
- the beliefs are rounded by the assignment with the highest product.
"""

from __future__ import annotations

import numpy as np

STEPS = 300
COOL = 0.3  # beta at the start
DAMPING = 0.5  # share of the old message that stays
EXCLUSION = 0.5  # power of a piece's sum of beliefs by which its weight falls in each step
TINY = np.float32(1e-30)


def beliefs(
    right: np.ndarray, below: np.ndarray, alone: np.ndarray, beside: np.ndarray, start: np.ndarray, hot: float
) -> np.ndarray:
    """Beliefs of M empty places in M pieces, in float32.

    Args:
        right, below: (M, M), minus the logarithm of the probability of piece j to the right of, or below, piece i.
        alone: (M, M), the same of piece i at place p, its neighbours in known places included.
        beside: (M, 4) int, the empty place to the left, to the right, above and below; M where there is none.
        start: (4, M, M) positive, the messages from these sides before the first step; ones, unless all places are
            alike and something has to break the tie.
        hot: beta at the end.

    Returns:
        (M, M): row p sums to 1.
    """
    count = len(alone)
    pairs = [table.astype(np.float32) for table in (right, right.T, below, below.T)]
    alone = (alone - alone.min(axis=1, keepdims=True)).astype(np.float32)
    messages = _scaled(start.astype(np.float32))
    # Where there is no neighbour on a side, the message says nothing.
    silent = (beside == count).T[:, :, None]
    source = np.where(beside == count, 0, beside).T
    weight = np.ones(count, dtype=np.float32)
    for beta in np.linspace(COOL, hot, STEPS, dtype=np.float32):
        own = np.exp(-beta * alone) * weight
        chances = [np.exp(-beta * table) for table in pairs]
        for chance in chances:
            np.fill_diagonal(chance, 0)
        # What a place tells the one to its right leaves out what it heard from there, and so on for each side.
        heard = [_scaled(own * _product(messages, without)) for without in (1, 0, 3, 2)]
        told = np.stack(
            [_scaled(said @ chance)[source[k]] for k, (said, chance) in enumerate(zip(heard, chances, strict=True))]
        )
        messages = DAMPING * messages + (1 - DAMPING) * np.where(silent, np.float32(1), told)
        found = _scaled(own * messages.prod(axis=0)) / count
        weight = weight * (found.sum(axis=0) + np.float32(1e-6)) ** np.float32(-EXCLUSION)
        weight /= weight.mean()
    return found


def _product(messages: np.ndarray, without: int) -> np.ndarray:
    """Of the messages from three of the four sides."""
    one, two, three = (messages[side] for side in range(4) if side != without)
    return one * two * three


def _scaled(rows: np.ndarray) -> np.ndarray:
    """Rows with the mean 1."""
    return rows / (rows.mean(axis=-1, keepdims=True) + TINY)
