"""Every token's features, and one bit of each of its targets, from the gradient of a linear head under an L1 loss.

A head y_i = W h_i + b whose outputs are compared with targets x_i (pixels of patches) by c sum |y - x| sends

    dL/dW = c S^T H,    dL/db = c S^T 1,    S = sign(Y - X)  (T, K),    H (T, D) the features of the T tokens.

Only S and H are unknown, and S is binary: its rows are vectors of signs within the column space of dL/dW, U (K, T).
This is blind separation of binary sources (van der Veen, "Analytical method for blind binary signal separation", IEEE
Trans. Signal Processing 45, 1997), solved here by minimising sum_k (v_k^2 - 1)^2 over v = U w from random starts
(constant modulus; the step is the fixed point of Hyvarinen and Oja 1997) and rounding. What is an exact vector of signs
in U is kept, up to its sign.

Where three tokens' signs combine, s_a + s_b - s_c or the like is a vector of signs as well, so that more than T may be
found. Which of them are tokens follows from the coefficients: on the tokens, dL/db / c has the coefficient 1 on every
one, and dL/dW / c features that are not negative, as after a ReLU (before the last layer of MST's decoder). A search
exchanges vectors until that is so; the solution is accepted where all coefficients of dL/db are equal. Heads whose
features can be negative were not tried.

Then x_ik > y_ik where s_ik < 0, with y = W h + b known: one bit of every pixel at a known threshold, masked patches
included. The order of the tokens is not in the head's gradient.

It cannot be read where tokens are as many as the head's rows K or channels D: U is then the whole space, which holds
every vector of signs, or lacks some of the tokens'.
"""

from __future__ import annotations

from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Tensor
from torch.nn import functional

from attacks.linear.dense_head import DenseHead
from attacks.registry import UsageError

# Random starts of a batch, batches, steps of a start, and their length; roundings into the span.
STARTS, BATCHES, STEPS, LENGTH, ROUNDINGS = 500, 20, 150, 0.3, 10
# Distance from the span up to which a vector of signs lies in it; it is 2 sqrt(1 - T / K) where one sign is wrong.
INSIDE = 1e-2
# Sign vectors for each token up to which a search chooses among them: searches, moves of one, and moves for which a
# vector that left may not come back. Shares of a vector below this are zero; weight of the ones beside the features;
# violation at which the search ends.
MOST_A_TOKEN, SEARCHES, MOVES, TABU, LEAST_SHARE, WEIGHT_OF_ONES, ALLOWED = 5, 3, 200, 10, 0.2, 5.0, 1e-2
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
    """T of the vectors of signs (m, K), independent, on which the gradient (K, D + 1) has coefficients of tokens.

    A tabu search: of all exchanges of one chosen vector the one with the least violation is made, until there is none.

    Raises:
        UsageError: there are too many to choose from.
    """
    count, tokens = len(found), span.shape[1]
    if count > MOST_A_TOKEN * tokens:
        raise UsageError(
            f"{count} vectors of signs lie in the span of a head's gradient of rank {tokens}: uniform patches, whose "
            "signs combine, leave open which of them are tokens"
        )
    vectors, targets = span.T @ found.T, span.T @ sent / _scale(sent[:, -1])  # (T, m), (T, D + 1)
    best, least = torch.arange(tokens, device=found.device), float("inf")
    for start in range(SEARCHES):
        chosen, left = _independent(vectors, start), torch.zeros(count, dtype=torch.int64, device=found.device)
        for move in range(MOVES):
            solved = torch.linalg.solve(vectors[:, chosen], torch.cat([vectors, targets], dim=1))
            shares, coefficients = solved[:, :count], solved[:, count:]  # (T, m), (T, D + 1)
            violation = float(_violation(coefficients))
            if violation < least:
                best, least = chosen.clone(), violation
            open_ = left <= move
            open_[chosen] = False
            out, into = ((shares.abs() > LEAST_SHARE) & open_).nonzero().T
            if least < ALLOWED or not len(out):
                break
            chosen, left = _best_exchange(chosen, left, shares, coefficients, out, into, move)
        if least < ALLOWED:
            break
    return found[best]


def _best_exchange(
    chosen: Tensor, left: Tensor, shares: Tensor, coefficients: Tensor, out: Tensor, into: Tensor, move: int
) -> tuple[Tensor, Tensor]:
    """The chosen vectors (T,) after one of the exchanges out -> into (n,), and until when vectors may not come back."""
    shares, each = shares[:, into].T, torch.arange(len(out))  # (n, T)
    pivot = coefficients[out] / shares[each, out][:, None]  # (n, D + 1), of the vector that comes in
    changed = coefficients - shares[:, :, None] * pivot[:, None]  # (n, T, D + 1)
    changed[each, out] = pivot
    best = int(_violation(changed).argmin())
    chosen, left = chosen.clone(), left.clone()
    left[chosen[out[best]]] = move + TABU
    chosen[out[best]] = into[best]
    return chosen, left


def _violation(coefficients: Tensor) -> Tensor:
    """How far coefficients [H, 1] (..., T, D + 1), each row up to its sign, are from features >= 0 and from ones."""
    turned = coefficients * torch.where(coefficients[..., -1:] < 0, -1.0, 1.0)
    negative = (-turned[..., :-1]).clamp(min=0).sum(dim=(-1, -2))
    return negative + WEIGHT_OF_ONES * (turned[..., -1] - 1).abs().sum(dim=-1)


def _scale(bias_gradient: Tensor) -> Tensor:
    """c of c S^T 1, (K,), whose entries differ by multiples of 2 c."""
    values = bias_gradient.sort().values
    steps = values.diff()
    steps = steps[steps > EQUAL * values.abs().max()]
    return steps.min() / 2 if len(steps) else values.abs().max()


def _independent(vectors: Tensor, seed: int) -> Tensor:
    """(T,) int64, some T of the vectors (T, m) that are independent: others for another seed."""
    weights = 0.5 + torch.rand(vectors.shape[1], generator=torch.Generator().manual_seed(seed))
    _, _, order = scipy.linalg.qr((vectors * weights.to(vectors)).cpu().numpy(), mode="economic", pivoting=True)
    return torch.as_tensor(order[: len(vectors)], dtype=torch.int64)
