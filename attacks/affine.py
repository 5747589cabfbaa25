"""The linear solve behind the closed forms: rows X from S = G^T X.

Every analytic attack on a ViT ends in one system: an outer-product sum S = sum_i g_i x_i^T (D, P), whose left factors
g_i are in the same message (G, (N, D)), solved for the rows x_i. This module solves it in float64, tells how well
conditioned it was, and names what it leaves open: the combinations of rows that no equation reaches (the null space of
G^T), which `priors` settles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Singular values of G below this many round-off units of the gradients' own type, relative to the largest, are error
# and not signal.
ROUND_OFF_UNITS = 2.5


def noise_floor(gradients: Tensor) -> float:
    """Relative size of the round-off in gradients of this type: 3e-7 for float32."""
    return ROUND_OFF_UNITS * torch.finfo(gradients.dtype).eps


@dataclass(frozen=True)
class RowSolution:
    """Solution of G^T X = S.

    Attributes:
        rows: X of least norm, (N, P) float64.
        free: orthonormal basis of the row combinations left open, (N, k) float64: X + free @ C solves the system too.
        rank: numerical rank of G.
        condition: largest over smallest kept singular value of G.
        residual: |G^T X - S| / |S|, near 0 where a solution exists.
    """

    rows: Tensor
    free: Tensor
    rank: int
    condition: float
    residual: float


def solve_rows(factors: Tensor, products: Tensor, *, rcond: float | None = None) -> list[RowSolution]:
    """Solve G^T X = S for X, for a batch of systems, by singular value decompositions in float64.

    Of LAPACK's drivers the plain decomposition costs a few milliseconds at (196, 384), about as much as `gelsy` and a
    third of `gelsd` (benchmarks/speed.py measures them), and is the only one that also gives the free directions.

    Args:
        factors: G, (B, N, D), one gradient row an unknown row; rows that are zero come back as zero.
        products: S, (B, D, P).
        rcond: singular values below `rcond` times the largest count as zero; by default the round-off of G's type.

    Returns:
        One solution a system.

    Raises:
        ValueError: shapes that do not fit.
    """
    if factors.shape[0] != products.shape[0] or factors.shape[2] != products.shape[1]:
        raise ValueError(f"G is {tuple(factors.shape)}, S is {tuple(products.shape)}: their B or D differ")
    rcond = noise_floor(factors) if rcond is None else rcond
    g, s = factors.to(torch.float64), products.to(torch.float64)
    # U must be square to hold the free directions; the reduced form already is where N <= D.
    u, sigma, vh = torch.linalg.svd(g, full_matrices=g.shape[1] > g.shape[2])
    kept = sigma > rcond * sigma[:, :1]  # (B, min(N, D))
    inverse = torch.where(kept, 1 / sigma.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    rows = u[..., : sigma.shape[1]] @ (inverse[..., None] * (vh[:, : sigma.shape[1]] @ s))  # (B, N, P)
    size = torch.linalg.matrix_norm(s).clamp(min=torch.finfo(torch.float64).tiny)
    residual = (torch.linalg.matrix_norm(g.mT @ rows - s) / size).tolist()
    ranks = kept.sum(dim=1).tolist()
    condition = [float(sigma[b, 0] / sigma[b, r - 1]) if r else float("inf") for b, r in enumerate(ranks)]
    return [RowSolution(rows[b], u[b, :, r:], r, condition[b], residual[b]) for b, r in enumerate(ranks)]
