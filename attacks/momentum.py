"""Updates of a client that keeps its momentum from one to the next: what each gradient added.

SGD with momentum mu sends u_t = g_t + mu u_(t-1), u_1 = g_1 (PyTorch's SGD without dampening; the weights move by the
learning rate times u_t). Two updates in a row give g_t = u_t - mu u_(t-1), in any precision, so that a server that saw
the one before solves with the gradient of the last batch alone. A client that starts anew in every round (as Flower's
do unless they keep state) sends no momentum, and nothing may be subtracted from its updates.

Which of both it is shows in the update: for a batch of k images the gradient of the classifier's weights has rank k,
and with k < K - 1, K classes, u_t - m u_(t-1) has so only at m = mu. For one image a step mu need not be stated. Weight
decay, which PyTorch adds to g_t, is left in and removed afterwards (`attacks.fingerprints`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attacks.classifier import classifier_weight, find_classifier
from attacks.findings import Finding
from attacks.observation import Observation
from attacks.registry import UsageError

# Coefficients that are tried before the best is refined, and how often its surroundings are cut to 0.38 of their width.
TRIED, REFINED = 100, 40
# Share of the classifier's gradient beyond its rank: at most at mu, and by which factor more without it.
CLEAN, MIXED = 1e-2, 10.0


@dataclass
class KeptMomentum:
    """Takes out of each update what its client kept of the one before; called with all updates of all clients in order.

    Args:
        coefficient: mu, in [0, 1); None where it is not known: then nothing is removed, and momentum that shows is
            named.

    Raises:
        UsageError: no such coefficient.
    """

    coefficient: float | None = None
    _last: dict[int, Observation] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.coefficient is not None and not 0 <= self.coefficient < 1:
            raise UsageError(f"a momentum of {self.coefficient:g} lies outside [0, 1)")

    def __call__(self, sent: Observation, observation: Observation) -> tuple[Observation, Finding | None]:
        """The update without momentum, and what was found.

        Args:
            sent: the update as it was sent.
            observation: the same without weight decay, as far as that is known.
        """
        mu, before = self.coefficient, self._last.get(sent.client)
        if mu == 0 or sent.local_steps > 1:
            return observation, None
        self._last[sent.client] = sent if mu else _classifier_alone(sent)
        if before is None:
            return observation, None
        if mu is None:
            found = find_momentum(before, observation)
            return observation, None if found is None else _unknown(found)
        if _classifiers(before, observation) is None:
            sentence = "whether the client keeps its momentum between rounds does not show, and none was subtracted"
            return observation, Finding("momentum", sentence)
        if not carries_momentum(before, observation, mu):
            return observation, None
        sentence = f"the client keeps its momentum between rounds: {mu:g} times its last update was subtracted"
        return remove_momentum(before, observation, mu), Finding("momentum", sentence, fixed=True)


def _unknown(found: float) -> Finding:
    sentence = (
        f"the client keeps its momentum between rounds: the update holds {found:.2g} times the one before (pass "
        f"momentum={found:.2g}, and it is subtracted)"
    )
    return Finding("momentum", sentence, hinders=True)


def _classifier_alone(observation: Observation) -> Observation:
    name = f"{find_classifier(observation)}.weight"
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if n == name})


def remove_momentum(before: Observation, after: Observation, coefficient: float) -> Observation:
    """The gradient that the later of two updates in a row added; parameters that the earlier one lacks are left out."""
    shared = [name for name in after.gradients if name in before.gradients]
    own = {name: after.gradients[name] - coefficient * before.gradients[name] for name in shared}
    return replace(after, gradients=own)


def carries_momentum(before: Observation, after: Observation, coefficient: float) -> bool:
    """Whether the later of two updates in a row of one step each holds `coefficient` times the earlier one."""
    pair = _classifiers(before, after)
    if pair is None:
        return False
    old, new = pair
    rank = after.num_examples
    least, without = (float(_beyond_rank(new - m * old, rank)) for m in (coefficient, 0.0))
    return least < CLEAN and without > MIXED * least


def find_momentum(before: Observation, after: Observation) -> float | None:
    """mu of two updates in a row, of one image and one step each; None where they show none."""
    pair = _classifiers(before, after)
    if pair is None or before.num_examples > 1:
        return None
    old, new = pair
    grid = torch.linspace(0, 1, TRIED + 1, dtype=torch.float64)
    best = int(torch.stack([_beyond_rank(new - m * old, 1) for m in grid]).argmin())
    low, high = (float(grid[min(max(best + side, 0), TRIED)]) for side in (-1, 1))
    for _ in range(REFINED):
        left, right = low + 0.382 * (high - low), high - 0.382 * (high - low)
        if _beyond_rank(new - left * old, 1) < _beyond_rank(new - right * old, 1):
            high = right
        else:
            low = left
    middle = (low + high) / 2
    return middle if 0 < middle < 1 and carries_momentum(before, after, middle) else None


def _classifiers(before: Observation, after: Observation) -> tuple[Tensor, Tensor] | None:
    """Both gradients of the classifier's weights in a basis of their common rows; None where rank would not show."""
    pair = [classifier_weight(observation) for observation in (before, after)]
    if any(g is None for g in pair) or max(before.local_steps, after.local_steps) > 1:
        return None
    old, new = (g.double() for g in pair)
    if min(len(new) - 1, new.shape[1]) <= after.num_examples:
        return None
    # Both are sums of few outer products: their common row space holds all that rank can show.
    rows = torch.linalg.qr(torch.cat([old, new]).T).Q[:, : 2 * len(old)]
    return old @ rows, new @ rows


def _beyond_rank(matrix: Tensor, rank: int) -> Tensor:
    """Share of a matrix (by norm) that its best approximation of that rank leaves."""
    sizes = torch.linalg.svdvals(matrix)
    return sizes[rank:].norm() / sizes.norm().clamp(min=torch.finfo(torch.float64).tiny)
