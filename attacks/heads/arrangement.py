"""Tokens of several views of an image to the places of those views.

What is known of a token is how unlikely it is at each place (`attacks.heads.one_bit`), in any of the views. Tokens side
by side in one view should continue each other; so the views are laid below each other, with a row of pieces between
them that costs nothing, and the jigsaw solver (`attacks.mjp.jigsaw_solver`) minimises the sum of both. Then the model
decides: with the patches that an arrangement supposes, the tokens that the head reads are computed and compared with
those that its gradient holds, and tokens are exchanged as long as that lowers the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import scipy.optimize
import torch
from torch import Tensor

from attacks.mjp.jigsaw_solver import Costs, border_costs, solve

# Weight of a standard deviation of the borders' costs, beside the logarithm of a probability.
BORDER = 10.0
# Two tokens of a view are exchanged only where that costs less than this, as a logarithm of a probability.
LARGEST_COST = 40.0
# An exchange has to lower the difference by this share.
LOWERED = 1e-3


@dataclass(frozen=True)
class Arrangement:
    """Which token is where, and which of them are masked.

    Attributes:
        tokens: (k N,) int64, the token at each place, view by view.
        hidden: (k N,) bool, places that are masked in their view.
    """

    tokens: Tensor
    hidden: Tensor


def first_places(surprise: Tensor, views: int) -> Tensor:
    """(T,) int64, the place of each token by `surprise` (T, N) alone, each place taken once in every view."""
    _, taken = scipy.optimize.linear_sum_assignment(surprise.repeat(1, views).cpu().numpy())
    return torch.as_tensor(taken, device=surprise.device) % surprise.shape[1]


def arrange(grid: tuple[int, int], surprise: Tensor, pieces: Tensor, masked: Tensor, most: float) -> Arrangement:
    """Lay out the tokens of k views.

    Args:
        grid: (rows, columns) of a view, N places.
        surprise: (k N, N), of each token at each place.
        pieces: (k N, C, p, p), each token's patch in [0, 1], roughly.
        masked: (N,) bool, places that one view masks, or more.
        most: surprise at a masked place, at most.
    """
    (rows, columns), places, count = grid, len(masked), len(surprise)
    views = count // places
    at = torch.where(masked, surprise.clamp(max=most), surprise).T.repeat(views, 1)  # (k N, tokens)
    borders = border_costs(pieces.double())
    weight = BORDER / max(float(torch.stack([borders.right, borders.below]).std()), 1e-12)
    board = torch.arange(views * (rows + 1) * columns, device=masked.device).view(views, rows + 1, columns)
    slots = board[:, :-1].flatten()  # places of the views; the last row of each is empty
    costs = (_spread(c, slots, board.numel()) for c in (weight * borders.right, weight * borders.below, at))
    free = torch.zeros(board.numel(), dtype=torch.bool, device=masked.device)
    free[slots] = True
    order = solve((views * (rows + 1), columns), Costs(*costs), free)
    token_of = torch.empty(board.numel(), dtype=torch.int64, device=masked.device)
    token_of[slots] = torch.arange(count, device=masked.device)
    tokens = token_of[order[slots]]
    own = surprise[tokens, torch.arange(count, device=masked.device) % places].view(views, places)
    hidden = masked & (own == own.max(dim=0).values)
    return Arrangement(tokens, hidden.flatten())


def improved(
    arrangement: Arrangement, surprise: Tensor, masked: Tensor, difference: Callable[[Arrangement], float]
) -> Arrangement:
    """Exchange tokens, and what is masked, as long as that lowers the difference.

    Args:
        arrangement: to begin with.
        surprise, masked: see `arrange`.
        difference: of the tokens that the model has under an arrangement from those of the head's gradient.
    """
    least, lowered = difference(arrangement), True
    while lowered:
        lowered = False
        for one, other in combinations(range(len(arrangement.tokens)), 2):
            for trial in _exchanged(arrangement, surprise, masked, one, other):
                found = difference(trial)
                if found < least * (1 - LOWERED):
                    arrangement, least, lowered = trial, found, True
    return arrangement


def _exchanged(own: Arrangement, surprise: Tensor, masked: Tensor, one: int, other: int) -> list[Arrangement]:
    """What two places allow: their tokens exchanged, within a view or a place; or other masks of one place."""
    places, pair, found = len(masked), [one, other], []
    same, within = one % places == other % places, one // places == other // places
    if same and masked[one % places]:
        for flags in ((True, False), (False, True), (True, True)):
            hidden = own.hidden.clone()
            hidden[pair] = torch.tensor(flags, device=hidden.device)
            found.append(replace(own, hidden=hidden))
    if same or within and _cost(own.tokens, surprise, one, other) < LARGEST_COST:
        tokens, hidden = own.tokens.clone(), own.hidden.clone()
        tokens[pair] = tokens[pair[::-1]]
        if same:
            hidden[pair] = hidden[pair[::-1]]
        found.append(Arrangement(tokens, hidden))
    return found


def _cost(tokens: Tensor, surprise: Tensor, one: int, other: int) -> float:
    """What an exchange of two tokens adds to their surprise."""
    places = surprise.shape[1]
    a, b, here, there = tokens[one], tokens[other], one % places, other % places
    return float(surprise[a, there] + surprise[b, here] - surprise[a, here] - surprise[b, there])


def _spread(costs: Tensor, slots: Tensor, size: int) -> Tensor:
    """Costs (n, n) at `slots` of a larger board, zero elsewhere."""
    found = costs.new_zeros(size, size)
    found[slots[:, None], slots] = costs
    return found
