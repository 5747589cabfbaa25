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


def solve_rows(factors: Tensor, products: Tensor, *, rcond: float | None = None) -> RowSolution:
    """Solve G^T X = S for X by a singular value decomposition in float64.

    Args:
        factors: G, (N, D), one gradient row an unknown row.
        products: S, (D, P).
        rcond: singular values below `rcond` times the largest count as zero; by default the round-off of G's type.

    Raises:
        ValueError: shapes that do not fit.
    """
    if factors.shape[1] != products.shape[0]:
        raise ValueError(f"G is {tuple(factors.shape)}, S is {tuple(products.shape)}: their D differ")
    rcond = noise_floor(factors) if rcond is None else rcond
    g, s = factors.to(torch.float64), products.to(torch.float64)
    u, sigma, vh = torch.linalg.svd(g, full_matrices=True)  # (N, N), (min,), (D, D)
    rank = int((sigma > rcond * sigma[0]).sum()) if sigma.numel() and sigma[0] > 0 else 0
    kept = sigma[:rank]
    rows = u[:, :rank] @ ((vh[:rank] @ s) / kept[:, None])
    residual = float((g.T @ rows - s).norm() / s.norm()) if s.norm() > 0 else 0.0
    condition = float(kept[0] / kept[-1]) if rank else float("inf")
    return RowSolution(rows, u[:, rank:], rank, condition, residual)
