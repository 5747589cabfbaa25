"""Updates of a client that keeps its momentum from one to the next: what each gradient added.

SGD with momentum mu sends u_t = g_t + mu u_(t-1), u_1 = g_1 (PyTorch's SGD without dampening; the weights move by the
learning rate times u_t). Two updates in a row give g_t = u_t - mu u_(t-1), in any precision, so that a server that saw
the one before solves with the gradient of the last image alone. A client that starts anew in every round (as Flower's
do unless they keep state) sends no momentum.

mu need not be stated: for one image a step the gradient of the classifier's weights is of rank one, and u_t - m u_(t-1)
is so only at m = mu. Weight decay, which PyTorch adds to g_t, is left in and removed afterwards
(`attacks.fingerprints`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attacks.identities import classifier_gradient
from attacks.observation import Observation
from attacks.registry import UsageError

# Coefficients that are tried before the best is refined, and how often its surroundings are cut to 0.38 of their width.
TRIED, REFINED = 100, 40
# Share of the classifier's gradient beyond rank one: at most at mu, and at least without it.
CLEAN, MIXED = 1e-2, 10.0


def remove_momentum(observations: Sequence[Observation], coefficient: float) -> list[Observation]:
    """The gradient that each update added; parameters that the update before lacks are left out.

    Args:
        observations: all updates of one client, oldest first, none left out in between; the first starts at rest.
        coefficient: mu, in [0, 1).

    Raises:
        UsageError: no such coefficient, or an update of several local steps.
    """
    if not 0 <= coefficient < 1:
        raise UsageError(f"a momentum of {coefficient:g} lies outside [0, 1)")
    if any(observation.local_steps > 1 for observation in observations):
        raise UsageError("momentum is removed from updates of one local step; these sum several")
    found = list(observations[:1])
    for before, after in zip(observations, observations[1:], strict=False):
        shared = [name for name in after.gradients if name in before.gradients]
        own = {name: after.gradients[name] - coefficient * before.gradients[name] for name in shared}
        found.append(replace(after, gradients=own))
    return found


def find_momentum(before: Observation, after: Observation) -> float | None:
    """mu of two updates in a row, of one image and one step each; None where they show none."""
    pair = [classifier_gradient(observation) for observation in (before, after)]
    if any(g is None for g in pair) or max(o.num_examples * o.local_steps for o in (before, after)) > 1:
        return None
    old, new = (g.double() for g in pair)
    # Both are sums of few outer products: their common row space holds all that rank can show.
    rows = torch.linalg.qr(torch.cat([old, new]).T).Q[:, : 2 * len(old)]
    old, new = old @ rows, new @ rows
    grid = torch.linspace(0, 1, TRIED + 1, dtype=torch.float64)
    best = int(torch.stack([_beyond_rank_one(new - m * old) for m in grid]).argmin())
    low, high = (float(grid[min(max(best + side, 0), TRIED)]) for side in (-1, 1))
    for _ in range(REFINED):
        left, right = low + 0.382 * (high - low), high - 0.382 * (high - low)
        if _beyond_rank_one(new - left * old) < _beyond_rank_one(new - right * old):
            high = right
        else:
            low = left
    middle = (low + high) / 2
    least, without = (float(_beyond_rank_one(new - m * old)) for m in (middle, 0.0))
    return middle if least < CLEAN and without > MIXED * least and 0 < middle < 1 else None


def _beyond_rank_one(matrix: Tensor) -> Tensor:
    """Share of a matrix (by norm) that its best approximation of rank one leaves."""
    sizes = torch.linalg.svdvals(matrix)
    return sizes[1:].norm() / sizes.norm().clamp(min=torch.finfo(torch.float64).tiny)
