"""The linear solve behind the closed forms: rows X from S = G^T X.

Every analytic attack on a ViT ends in one system: an outer-product sum S = sum_i g_i x_i^T (D, P), whose left factors
g_i are in the same message (G, (N, D)), solved for the rows x_i in float64. With G = U diag(sigma) V^T the message says
of the combination u_i^T X that it is v_i^T S / sigma_i, up to an error of nu / sigma_i, where nu is the rms error of an
entry of S. What S holds outside of span(V) is nothing but that error, so it tells nu, be it round-off or noise that a
client added: no cut-off has to be guessed. (On DeiT-S the error so predicted is within 20 % of the true one over nine
orders of magnitude of sigma.) Rows are in units of normalised pixels, of variance 1, so that

    X = U diag(sigma / (sigma^2 + nu^2)) V^T S

is the linear estimate of least error. Combinations whose error is not small against 1 are *weak*: an image prior can
settle them better (`attacks.linear.null_space`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
# A combination of rows is weak where its standard deviation exceeds this share of a normalised pixel's (1).
SETTLED = 1e-3
# Round-off of an entry of S in units of the type's, relative to the rms entry, where S does not tell (N >= D).
ROUND_OFF_UNITS = 2.0


def noise_floor(gradients: Tensor) -> float:
    """Share of the largest singular value below which those of float gradients are round-off: 3e-7 for float32."""
    return 2.5 * torch.finfo(gradients.dtype).eps


@dataclass(frozen=True)
class RowSolution:
    """Solution of G^T X = S.

    Attributes:
        rows: X, (N, P) float64; zero along what no equation reaches.
        weak: orthonormal combinations of rows that the equations settle badly or not at all, (N, f) float64.
        deviation: standard error of an entry of weak^T X by the equations alone, (f,); infinite in the null space.
        rank: combinations known better than to a pixel's standard deviation.
        condition: largest over smallest of their singular values.
        residual: |G^T X - S| / |S|, near 0 where a solution exists.
    """

    rows: Tensor
    weak: Tensor
    deviation: Tensor
    rank: int
    condition: float
    residual: float

    @property
    def free(self) -> int:
        """Combinations of which the equations say nothing worth having."""
        return len(self.rows) - self.rank


def solve_rows(factors: Tensor, products: Tensor, *, rcond: float | None = None) -> list[RowSolution]:
    """Solve G^T X = S for X, for a batch of systems, by singular value decompositions in float64.

    Of LAPACK's drivers the plain decomposition costs a few milliseconds at (196, 384), about as much as `gelsy` and a
    third of `gelsd` (benchmarks/speed.py measures them), and is the only one that also gives the free directions.

    Args:
        factors: G, (B, N, D), one gradient row an unknown row; rows that are zero come back as zero.
        products: S, (B, D, P).
        rcond: instead of weighing, solve exactly for singular values above `rcond` times the largest and not at all
            for the others.

    Returns:
        One solution a system.

    Raises:
        ValueError: shapes that do not fit.
    """
    if factors.shape[0] != products.shape[0] or factors.shape[2] != products.shape[1]:
        raise ValueError(f"G is {tuple(factors.shape)}, S is {tuple(products.shape)}: their B or D differ")
    g, s = factors.to(torch.float64), products.to(torch.float64)
    # U must be square to hold the null space; the reduced form already is where N <= D.
    u, sigma, vh = torch.linalg.svd(g, full_matrices=g.shape[1] > g.shape[2])
    count = sigma.shape[1]  # min(N, D)
    heard = vh[:, :count] @ s  # V^T S, (B, count, P)
    outside = torch.linalg.matrix_norm(s - vh[:, :count].mT @ heard)  # by subtracting squares it would drown, (B,)
    noise = _noise(g, s, outside, factors.dtype)[:, None]  # (B, 1)
    if rcond is None:
        gain = sigma / (sigma.square() + noise.square()).clamp(min=TINY)
        known = sigma > noise
    else:
        known = sigma > rcond * sigma[:, :1]
        gain = torch.where(known, 1 / sigma.clamp(min=TINY), 0.0)
    rows = u[..., :count] @ (gain[..., None] * heard)  # (B, N, P)
    shrunk = torch.linalg.matrix_norm((1 - sigma * gain)[..., None] * heard)  # (B,)
    residual = (torch.hypot(outside, shrunk) / torch.linalg.matrix_norm(s).clamp(min=TINY)).tolist()
    deviation = torch.full(u.shape[::2], torch.inf, dtype=g.dtype, device=g.device)  # (B, N)
    deviation[:, :count] = noise / sigma
    ranks = known.sum(dim=1).tolist()
    solutions = []
    for b, rank in enumerate(ranks):
        weak = deviation[b] > SETTLED
        condition = float(sigma[b, 0] / sigma[b, rank - 1]) if rank else float("inf")
        solutions.append(RowSolution(rows[b], u[b][:, weak], deviation[b][weak], rank, condition, residual[b]))
    return solutions


def _noise(g: Tensor, s: Tensor, outside: Tensor, sent: torch.dtype) -> Tensor:
    """nu, (B,): rms error of an entry of S; from what it holds outside of V, or by the type's round-off (N >= D)."""
    round_off = torch.finfo(sent).eps * torch.linalg.matrix_norm(s) / (s.shape[1] * s.shape[2]) ** 0.5
    spare = g.shape[2] - g.shape[1]
    if spare <= 0:
        return ROUND_OFF_UNITS * round_off
    return (outside / (spare * s.shape[2]) ** 0.5).clamp(min=TINY)
