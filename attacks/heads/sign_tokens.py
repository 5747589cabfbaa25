"""Every token's features, and one bit of each of its targets, from the gradient of a linear head under an L1 loss.

A head y_i = W h_i + b whose outputs are compared with targets x_i (pixels of patches) by c sum |y - x| sends

    dL/dW = c S^T H,    dL/db = c S^T 1,    S = sign(Y - X)  (T, K),    H (T, D) the features of the T tokens.

Only S and H are unknown, and S is binary: its rows are vectors of signs within the column space of dL/dW, U (K, T).
This is blind separation of binary sources (van der Veen, "Analytical method for blind binary signal separation", IEEE
Trans. Signal Processing 45, 1997), solved here by minimising sum_k (v_k^2 - 1)^2 over v = U w from random starts
(constant modulus; the step is the fixed point of Hyvarinen and Oja 1997) and rounding. What is an exact vector of signs
in U is kept, up to its sign.

Where three tokens' signs combine, s_a + s_b - s_c or the like is a vector of signs as well, so that more than T may be
found. Which of them are tokens follows from dL/db, which has the coefficient c on every token: on other vectors some
coefficients differ. The least sum of coefficients is sought channel by channel (linear programmes), vectors that other
channels use weighing less (Candes, Wakin and Boyd 2008); the solution is accepted where all coefficients of dL/db are
equal.

Then x_ik > y_ik where s_ik < 0, with y = W h + b known: one bit of every pixel at a known threshold, masked patches
included. The order of the tokens is not in the head's gradient.

It cannot be read where tokens are as many as the head's rows K or channels D: U is then the whole space, which holds
every vector of signs, or lacks some of the tokens'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from torch import Tensor
from torch.nn import functional

from attacks.heads.dense_head import DenseHead
from attacks.registry import UsageError

# Random starts of a batch, batches, steps of a start, and their length; roundings into the span.
STARTS, BATCHES, STEPS, LENGTH, ROUNDINGS = 500, 20, 150, 0.3, 10
# Distance from the span up to which a vector of signs lies in it; it is 2 sqrt(1 - T / K) where one sign is wrong.
INSIDE = 1e-2
# Sign vectors for each token up to which linear programmes choose among them, and how often they are weighed.
MOST_A_TOKEN, WEIGHINGS = 4, 8
# Share of the most used vector's use that is added before uses become weights; least use that counts.
SOFTENED, USED = 0.03, 1e-6
# Largest relative difference of the coefficients of dL/db.
EQUAL = 1e-3


@dataclass(frozen=True)
class SignTokens:
    """What the head's gradient says of its tokens, in an order that is not that of their places.

    Attributes:
        signs: S, (T, K), +1 where the output is above the target.
        features: H, (T, D).
        outputs: Y, (T, K).
        scale: c.
        candidates: vectors of signs found in the span, of which the tokens' were chosen.
    """

    signs: Tensor
    features: Tensor
    outputs: Tensor
    scale: float
    candidates: int


def read_sign_tokens(head: DenseHead) -> SignTokens:
    """Solve for signs and features; see the module. T is the rank of the head's gradient.

    Raises:
        UsageError: why the gradient does not determine them.
    """
    span = torch.linalg.svd(head.weight_gradient, full_matrices=False).U[:, : head.rank]  # (K, T)
    found = sign_vectors(span)
    rank = int(torch.linalg.matrix_rank(found)) if len(found) else 0
    if rank < head.rank:
        raise UsageError(
            f"the gradient of {head.name} has rank {head.rank}, and vectors of signs span {rank} of it: its loss is "
            "not an L1 distance, or its tokens are too many for its rows to be separated"
        )
    sent = torch.cat([head.weight_gradient, head.bias_gradient[:, None]], dim=1)  # (K, D + 1)
    chosen = found if len(found) == rank else _choose(found, span, sent)
    solution = torch.linalg.lstsq(chosen.T, sent).solution  # (T, D + 1), c [H, 1] up to signs
    scales = solution[:, -1].abs()
    if float(scales.max() - scales.min()) > EQUAL * float(scales.median()):
        raise UsageError(
            f"{len(found)} vectors of signs lie in the span of the gradient of {head.name}, of rank {head.rank}, and "
            "no choice among them was found that gives all tokens the same weight: the signs of uniform patches combine"
        )
    turned = solution[:, -1].sign()[:, None]
    features = (turned * solution)[:, :-1] / scales.mean()
    return SignTokens(turned * chosen, features, features @ head.weight.T + head.bias, float(scales.mean()), len(found))


def sign_vectors(span: Tensor) -> Tensor:
    """The vectors of signs that were found in a space, (m, K) with first entry +1, for its orthonormal basis (K, T)."""
    generator = torch.Generator().manual_seed(0)
    found = span.new_zeros(0, len(span))
    for _ in range(BATCHES):
        start = torch.randn(span.shape[1], STARTS, generator=generator, dtype=torch.float64).to(span)
        w = functional.normalize(start, dim=0) * len(span) ** 0.5
        for _ in range(STEPS):
            w = w - LENGTH * (span.T @ (span @ w) ** 3 - w)
        signs = (span @ w).sign()
        for _ in range(ROUNDINGS):
            signs = (span @ (span.T @ signs)).sign()
        inside = (span @ (span.T @ signs) - signs).norm(dim=0) < INSIDE
        found = torch.unique(torch.cat([found, (signs[:, inside] * signs[:1, inside]).T]), dim=0)
    return found


def _choose(found: Tensor, span: Tensor, sent: Tensor) -> Tensor:
    """T of the vectors of signs (m, K), independent, on which the gradient (K, D + 1) has the least coefficients.

    Raises:
        UsageError: there are too many to choose from.
    """
    count, tokens = len(found), span.shape[1]
    if count > MOST_A_TOKEN * tokens:
        raise UsageError(
            f"{count} vectors of signs lie in the span of a head's gradient of rank {tokens}: uniform patches, whose "
            "signs combine, leave open which of them are tokens"
        )
    vectors, targets = (span.T @ found.T).cpu().numpy(), (span.T @ sent).cpu().numpy()
    both, targets = np.concatenate([vectors, -vectors], axis=1), targets / np.linalg.norm(targets, axis=0)
    weights = np.ones(2 * count)
    for _ in range(WEIGHINGS):
        programmes = (scipy.optimize.linprog(weights, A_eq=both, b_eq=target, method="highs") for target in targets.T)
        use = sum((np.maximum(solved.x, 0) for solved in programmes if solved.x is not None), np.zeros(2 * count))
        if int((use > USED).sum()) == tokens:
            break
        weights = 1 / (use + SOFTENED * use.max())
        weights /= weights.min()
    use = np.maximum(use[:count], use[count:])
    chosen: list[int] = []
    for candidate in np.argsort(-use):
        if np.linalg.matrix_rank(vectors[:, [*chosen, candidate]]) > len(chosen):
            chosen.append(int(candidate))
        if len(chosen) == tokens:
            break
    return found[chosen]
