"""The linear system behind every closed form, and the one rule for its rank and its noise.

Every analytic attack on a ViT solves one system: an outer-product sum

    S = G^T X + F^T Y + noise          S (D, P), G (N, D), F (h, D)

for the rows X (N, P), in float64. S and G are in the message. F and Y are not: they stand for at most h further rows
whose left factors were not sent (h = 0 for one undefended image, the number of masked patches under MJP, N (k - 1)
differences for a batch of k images). With the singular value decomposition G = U diag(sigma) V^T:

*Rest.* R, what S holds outside of span(V), is h rows of Y mixed plus noise: its leading h right singular vectors span
the rows of Y as long as D - N >= h.

*Noise.* What R holds beyond its h leading singular values is nothing but the error of S, so it gives nu, the rms error
of an entry of S, be it round-off or noise that a client added: no cut-off has to be guessed. Singular values of R
within `EDGE` of the largest that pure noise would have are not counted as rows of Y. Where R has no spare rows (N + h
>= D), the round-off of the gradients' type is assumed.

*Rows and rank.* The message gives the combination u_i^T X as v_i^T S / sigma_i with standard error nu / sigma_i. Rows
are in units of normalised pixels, of variance 1, so that

    X = U diag(sigma / (sigma^2 + nu^2)) V^T S

is the linear estimate of least error, and a combination counts for the rank where its standard error is below 1. (On
DeiT-S the predicted error is within 20 % of the true one over nine orders of magnitude of sigma.) Combinations whose
error is not small against 1 are *weak*: an image prior can settle them better (`attacks.linear.null_space`). Where rows
are hidden, combinations whose sigma is round-off of G itself are dropped: dividing by it multiplies not noise but F^T
Y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
# Noise of systems that are exact to the last digit: small enough not to matter, large enough to be squared.
LEAST_NOISE = 1e-140
# A combination of rows is weak where its standard deviation exceeds this share of a normalised pixel's (1).
SETTLED = 1e-3
# Round-off of an entry of S in units of the type's, relative to the rms entry, where S has no spare rows.
ROUND_OFF_UNITS = 2.0
# Singular values of G below this multiple of the type's round-off, relative to the largest, are round-off of G.
ROUND_OFF_OF_G = 2.5
# Singular values of R within this factor of the largest that pure noise would have are counted as noise.
EDGE = 1.2


@dataclass(frozen=True)
class RowSolution:
    """Solution of G^T X + F^T Y = S for X.

    Attributes:
        rows: X, (N, P) float64; zero along what no equation reaches. Off the span of `unknown`, right up to the noise.
        weak: orthonormal combinations of rows that the equations settle badly or not at all, (N, f) float64.
        deviation: standard error of an entry of weak^T X by the equations alone, (f,); infinite in the null space.
        noise: nu, rms error of an entry of S.
        rank: combinations known better than to a pixel's standard deviation.
        condition: largest over smallest of their singular values.
        residual: |G^T X - S| / |S|, near 0 where a solution without hidden rows exists.
        gains: (N,) variance of each row in units of the variance of an entry of S: off the span of `unknown` that is
            noise^2, along a row of `unknown` its squared length.
        unknown: (k, P) with orthogonal rows, k <= h: the directions of Y above the noise. unknown^T unknown is the
            second moment of a row of R.
        spare: D - N rows of R, 0 where N >= D.
    """

    rows: Tensor
    weak: Tensor
    deviation: Tensor
    noise: float
    rank: int
    condition: float
    residual: float
    gains: Tensor
    unknown: Tensor
    spare: int

    @property
    def free(self) -> int:
        """Combinations that the equations leave as uncertain as a pixel is by itself, or more."""
        return len(self.rows) - self.rank


def solve_rows(
    factors: Tensor,
    products: Tensor,
    *,
    hidden: int = 0,
    rcond: float | None = None,
    sent: torch.dtype | None = None,
) -> list[RowSolution]:
    """Solve G^T X + F^T Y = S for X, for a batch of systems, by singular value decompositions in float64.

    Of LAPACK's drivers the plain decomposition costs a few milliseconds at (196, 384), about as much as `gelsy` and a
    third of `gelsd` (benchmarks/speed.py measures them), and is the only one that also gives the free directions.

    Args:
        factors: G, (B, N, D), one gradient row for each unknown row; rows that are zero come back as zero.
        products: S, (B, D, P).
        hidden: h, the most rows that F can have.
        rcond: instead of weighing, solve exactly for singular values above `rcond` times the largest and not at all
            for the others (the rule of APRIL's published code).
        sent: type in which the gradients were sent, for their round-off; by default that of `factors`.

    Returns:
        One solution for each system.

    Raises:
        ValueError: shapes that do not fit.
    """
    if factors.shape[0] != products.shape[0] or factors.shape[2] != products.shape[1]:
        raise ValueError(f"G is {tuple(factors.shape)}, S is {tuple(products.shape)}: their B or D differ")
    g, s = factors.to(torch.float64), products.to(torch.float64)
    rows, width = g.shape[1:]
    count = min(rows, width)
    # Square factors hold the null space of G^T (N > D), or the space outside of span(G) where rows may be hidden.
    u, sigma, vh = torch.linalg.svd(g, full_matrices=rows > width or hidden > 0)
    observed = vh[:, :count] @ s  # V^T S, (B, count, P)
    outside = s - vh[:, :count].mT @ observed  # R embedded in D rows; by subtracting squares it would drown
    rest = vh[:, count:] @ s if hidden else outside[:, :0]  # R, (B, D - count, P)
    return [
        _solve_one(u[b], sigma[b], observed[b], outside[b], rest[b], s[b], hidden, sent or factors.dtype, rcond)
        for b in range(len(g))
    ]


def _solve_one(
    u: Tensor,
    sigma: Tensor,
    observed: Tensor,
    outside: Tensor,
    rest: Tensor,
    s: Tensor,
    hidden: int,
    sent: torch.dtype,
    rcond: float | None,
) -> RowSolution:
    """One system, decomposed, to its solution."""
    (n, count), spare = (len(u), len(sigma)), len(s) - len(sigma)
    noise, unknown = _noise_and_unknown(outside, rest, s, spare, hidden, sent)
    precision = sigma.square() + noise**2
    if rcond is None:
        used = sigma > (ROUND_OFF_OF_G * torch.finfo(sent).eps * sigma[:1] if hidden else -1)
        known, gain = used & (sigma > noise), torch.where(used, sigma / precision.clamp(min=TINY), 0.0)
    else:
        known = used = sigma > rcond * sigma[:1]
        gain = torch.where(known, 1 / sigma.clamp(min=TINY), 0.0)
    shrunk = (1 - sigma * gain)[:, None] * observed
    deviation = sigma.new_full((n,), torch.inf)
    deviation[:count] = noise / sigma
    weak, rank = deviation > SETTLED, int(known.sum())
    return RowSolution(
        rows=u[:, :count] @ (gain[:, None] * observed),
        weak=u[:, weak],
        deviation=deviation[weak],
        noise=noise,
        rank=rank,
        condition=float(sigma[0] / sigma[rank - 1]) if rank else float("inf"),
        residual=float(torch.hypot(outside.norm(), shrunk.norm()) / s.norm().clamp(min=TINY)),
        gains=u[:, :count].square() @ torch.where(used, precision.clamp(min=TINY).reciprocal(), 0.0),
        unknown=unknown,
        spare=spare,
    )


def _noise_and_unknown(
    outside: Tensor, rest: Tensor, s: Tensor, spare: int, hidden: int, sent: torch.dtype
) -> tuple[float, Tensor]:
    """nu, and the directions of Y above it, (k, P)."""
    degrees = (spare - hidden) * (s.shape[1] - hidden)  # of freedom that pure noise has beyond the hidden rows
    round_off = ROUND_OFF_UNITS * torch.finfo(sent).eps * float(s.norm()) / s.numel() ** 0.5
    if not hidden:
        return (max(float(outside.norm()) / degrees**0.5, LEAST_NOISE) if spare > 0 else round_off), rest
    if not len(rest):
        return round_off, rest
    _, sizes, right = torch.linalg.svd(rest, full_matrices=False)  # descending; right singular vectors as rows
    beyond = spare > hidden and degrees > 0
    noise = max(float(sizes[hidden:].norm()) / degrees**0.5, LEAST_NOISE) if beyond else round_off
    edge = EDGE * noise * (len(rest) ** 0.5 + rest.shape[1] ** 0.5)
    kept = int((sizes[:hidden] > edge).sum())
    return noise, sizes[:kept, None] * right[:kept] / len(rest) ** 0.5
