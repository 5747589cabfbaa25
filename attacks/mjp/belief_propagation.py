"""Belief propagation for the jigsaw solver: how likely each piece is at each empty place, whatever lies elsewhere.

A place's belief in a piece is the product of the piece's own probability there and of one message from each side. The
message of a neighbour is what it believes without this place, summed over its pieces with the probability of the pair:

    b_p(i) ~ exp(-beta A_pi) prod over sides s of m_s(i),      m_s(i) ~ sum_j exp(-beta R_ji) b_q\\p(j).

A place keeps a probability for every piece. A search that has to choose one piece for each place cannot undo clusters
of pieces that fit each other in wrong places, where pairs are uncertain: no exchange of single pieces moves them. After
Cho, Avidan and Freeman ("A probabilistic image jigsaw puzzle", CVPR 2010). Departs from it:

- beta rises while messages are passed, from flat beliefs to decided ones;
- that every piece lies somewhere once is not a factor but a weight of each piece, lowered while the beliefs in it sum
  to more than one place;
- pieces in known places are constants; where there are none, the solver (`attacks.mjp.jigsaw_solver`) fixes one piece
  after the other as the only anchor, where the paper draws several pieces in their true places;
- the beliefs are rounded by the assignment with the highest product.
"""

from __future__ import annotations

import numpy as np

STEPS = 300
FIRST_BETA = 0.3
DAMPING = 0.5  # share of the old message that stays
EXCLUSION = 0.5  # power of a piece's sum of beliefs by which its weight falls in each step
TINY = np.float32(1e-30)


def beliefs(
    right: np.ndarray, below: np.ndarray, alone: np.ndarray, beside: np.ndarray, start: np.ndarray, last_beta: float
) -> np.ndarray:
    """Beliefs of M empty places in M pieces, in float32.

    Args:
        right, below: (M, M), minus the logarithm of the probability of piece j to the right of, or below, piece i.
        alone: (M, M), the same of piece i at place p, its neighbours in known places included.
        beside: (M, 4) int, the empty place to the left, to the right, above and below; M where there is none.
        start: (4, M, M) positive, the messages from these sides before the first step; ones, unless all places are
            alike and something has to break the tie.
        last_beta: beta of the last step.

    Returns:
        (M, M): row p sums to 1.
    """
    count = len(alone)
    pairs = [table.astype(np.float32) for table in (right, below)]
    alone = (alone - alone.min(axis=1, keepdims=True)).astype(np.float32)
    messages = _scaled(start.astype(np.float32))
    # Where there is no neighbour on a side, the message says nothing.
    silent = (beside == count).T[:, :, None]
    source = np.where(beside == count, 0, beside).T
    weight = np.ones(count, dtype=np.float32)
    for beta in np.linspace(FIRST_BETA, last_beta, STEPS, dtype=np.float32):
        own = np.exp(-beta * alone) * weight
        potentials = []  # of the messages from the left, from the right, from above and from below
        for table in pairs:
            onward = np.exp(-beta * table)
            np.fill_diagonal(onward, 0)  # no piece lies beside itself
            potentials += [onward, onward.T]
        # The message to a neighbour leaves out the one that came from it (the cavity distribution).
        cavities = [_scaled(own * _product(messages, without)) for without in (1, 0, 3, 2)]
        incoming = [_scaled(cavity @ potential) for cavity, potential in zip(cavities, potentials, strict=True)]
        incoming = np.stack([sent[source[side]] for side, sent in enumerate(incoming)])
        messages = DAMPING * messages + (1 - DAMPING) * np.where(silent, np.float32(1), incoming)
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
    # What `rows.mean` computes, without its checks, which take longer than the sum.
    return rows / (np.add.reduce(rows, axis=-1, keepdims=True) / np.float32(rows.shape[-1]) + TINY)
