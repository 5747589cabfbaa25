"""Every token's prediction and feature from the gradient of a head with a row for each place.

MP3 (Zhai et al., ICML 2022) sends no position gradient, but the rows of its head are places: token i belongs to row i.
With P the softmax outputs (N, N), row i those of token i, and H the features (N, D) that the head reads, the mean
cross-entropy of the places has

    N dL/dW = (P - I)^T H,    N dL/db = (P - I)^T 1,    P = softmax(H W^T + 1 b^T).

(P - I)^T has rank N - 1: with pi its null vector (P's stationary vector, pi^T P = pi^T, all entries positive), H is
determined up to pi v^T, v (D,). Of v the second equation says all that the softmax depends on: the columns of P sum to
1 + N dL/db, and with the logits H_0 W^T + b + pi s^T, s = W v, those sums are the derivative of the convex function

    f(s) = sum_i logsumexp(logits_i + pi_i s) / pi_i,

so that s follows by Newton's method, up to a constant which the softmax ignores. P -> pinv -> H_0 -> s -> P is iterated
from P = 1 / N, averaged with the one before while that lowers the change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.dense_head import DenseHead

# The iteration ends at this change of a probability, or after so many steps.
CONVERGED, MOST = 1e-12, 200
# Newton steps for the columns' sums, each at most this long.
NEWTON, LONGEST = 30, 5.0


@dataclass(frozen=True)
class PlaceFeatures:
    """What the head's gradient says of the tokens.

    Attributes:
        probabilities: P, (N, N), row i the prediction for the token at place i.
        features: H, (N, D), without what they have along `stationary`.
        stationary: pi, (N,), of length 1: the direction over tokens along which features are not determined.
        change: largest change of a probability in the last step.
        steps: of the iteration.
    """

    probabilities: Tensor
    features: Tensor
    stationary: Tensor
    change: float
    steps: int

    def determined(self, features: Tensor) -> Tensor:
        """(N, D) features without what they have along `stationary`."""
        return features - torch.outer(self.stationary, self.stationary @ features)


def read_places(head: DenseHead, start: Tensor | None = None) -> PlaceFeatures:
    """Solve for predictions and features; see the module. K = N rows are assumed.

    Args:
        start: P to begin with, (N, N); 1 / N by default.
    """
    count = len(head.weight)
    scaled, sums = count * head.weight_gradient, (1 + count * head.bias_gradient).clamp(min=1e-12)
    probabilities = torch.full_like(head.weight[:, :1], 1 / count).expand(count, count) if start is None else start
    change, share, shift, step = torch.inf, 1.0, torch.zeros_like(sums), 0
    while step < MOST:
        step += 1
        features, stationary = features_given(probabilities, scaled)
        logits = features @ head.weight.T + head.bias
        shift = _shift(logits, stationary, sums, shift)
        found = (logits + torch.outer(stationary, shift)).softmax(dim=1)
        before, change = change, float((found - probabilities).abs().max())
        if change < CONVERGED:
            probabilities = found
            break
        share = min(1.0, 1.5 * share) if change < before else max(0.05, share / 2)
        probabilities = probabilities + share * (found - probabilities)
    features, stationary = features_given(probabilities, scaled)
    return PlaceFeatures(probabilities, features, stationary, change, step)


def features_given(probabilities: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """H (N, D) of least norm with (P - I)^T H = `scaled`, and pi (N,)."""
    count = len(probabilities)
    left, sizes, right = torch.linalg.svd((probabilities - torch.eye(count).to(probabilities)).T)
    stationary = right[-1] * right[-1].sum().sign()
    return right[:-1].T @ (left[:, :-1].T @ scaled / sizes[:-1, None]), stationary


def _shift(logits: Tensor, stationary: Tensor, sums: Tensor, start: Tensor) -> Tensor:
    """s (N,) of mean 0, for which the columns of softmax(logits + pi s^T) have the given sums."""
    weights = stationary.clamp(min=1e-9)
    shift = start
    for _ in range(NEWTON):
        p = (logits + torch.outer(weights, shift)).softmax(dim=1)
        error = p.sum(dim=0) - sums
        hessian = torch.diag(weights @ p) - (weights[:, None] * p).T @ p + 1 / len(p)
        step = -torch.linalg.lstsq(hessian, error[:, None]).solution[:, 0]
        step = step - step.mean()
        limit = LONGEST / float((weights.max() * step.abs().max()).clamp(min=1e-300))
        shift = shift + min(1.0, limit) * step
        if float(step.abs().max()) < CONVERGED:
            break
    return shift
