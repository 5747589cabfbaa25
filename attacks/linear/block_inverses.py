"""Inverses of one k x k block a patch, m_i H + D_i, for preconditioning and for variances.

Where D_i = w_i D with one D for all patches, H and D are diagonalised together once: with S = m H + D = L L^T (m the
mean of the m_i) and L^-1 D L^-T = U diag(a) U^T,

    m_i H + w_i D = L U diag(m_i / m (1 - a) + w_i a) U^T L^T,

so that every block's inverse costs two products with one matrix instead of a factorisation of its own: the equations of
one update with a mask have this form. Where the D_i differ by more, each block is factored, or only its diagonal is
taken where blocks are large.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# Relative difference below which precisions are taken for multiples of one another.
MULTIPLES = 1e-9
# Above so many directions, blocks that each need a factorisation are replaced by their diagonals.
LARGE = 256


class BlockInverses(Protocol):
    """(m_i H + D_i)^-1, or an approximation to it, for i = 1 ... N."""

    def solve(self, x: Tensor) -> Tensor:
        """Each block's inverse applied to the row of x (N, k) that belongs to it."""

    def traces(self, matrix: Tensor) -> Tensor:
        """(N,) trace of each block's inverse times a symmetric matrix (k, k)."""


def invert_blocks(scales: Tensor, hessian: Tensor, precision: Tensor) -> BlockInverses:
    """The inverses of m_i H + diag(d_i).

    Args:
        scales: (N,) m_i, above 0.
        hessian: (k, k) H, symmetric and positive semidefinite.
        precision: (k,) d, or (N, k) where the d_i differ; not negative. Or (N, k, k), D_i that are not diagonal.

    Raises:
        torch.linalg.LinAlgError: a block is singular.
    """
    if precision.dim() == 1:
        return _Shared(scales, hessian, torch.ones_like(scales), precision)
    large = len(hessian) > LARGE
    if precision.dim() == 3:
        return (
            _Diagonal(scales, hessian, precision.diagonal(dim1=1, dim2=2))
            if large
            else _Factored(scales, hessian, precision)
        )
    weights, common = _multiples(precision)
    if torch.allclose(weights[:, None] * common, precision, rtol=MULTIPLES, atol=0.0):
        return _Shared(scales, hessian, weights, common)
    return (_Diagonal if large else _Factored)(scales, hessian, precision)


def _multiples(precision: Tensor) -> tuple[Tensor, Tensor]:
    """w (N,), around 1, and d (k,) whose products are the precisions (N, k), if those are multiples of one row."""
    sums = precision.sum(dim=1)  # (N,)
    middle = sums.median()
    row = precision[(sums - middle).abs().argmin()]
    return (sums / middle if middle > 0 else torch.ones_like(sums)), row


class _Shared:
    """Multiples of one d for all blocks."""

    def __init__(self, scales: Tensor, hessian: Tensor, weights: Tensor, precision: Tensor) -> None:
        mean = scales.mean()
        factor = torch.linalg.cholesky(mean * hessian + torch.diag(precision))
        half = torch.linalg.solve_triangular(factor, torch.diag(precision.sqrt()), upper=False)  # L^-1 D^(1/2)
        own, vectors = torch.linalg.eigh(half @ half.T)
        own = own.clamp(0.0, 1.0)  # (k,) a
        self.basis = torch.linalg.solve_triangular(factor.mT, vectors, upper=True)  # (k, k) L^-T U
        self.inverse = 1 / ((scales / mean)[:, None] * (1 - own) + weights[:, None] * own)  # (N, k)

    def solve(self, x: Tensor) -> Tensor:
        """Solutions (N, k) of every block's system with right-hand sides (N, k)."""
        return ((x @ self.basis) * self.inverse) @ self.basis.T

    def traces(self, matrix: Tensor) -> Tensor:
        """Trace of inverse times matrix (k, k), for every block (N,)."""
        return self.inverse @ (self.basis * (matrix @ self.basis)).sum(dim=0)


class _Factored:
    """A Cholesky factor a block."""

    def __init__(self, scales: Tensor, hessian: Tensor, precision: Tensor) -> None:
        own = precision if precision.dim() == 3 else torch.diag_embed(precision)
        self.factors = torch.linalg.cholesky(scales[:, None, None] * hessian + own)

    def solve(self, x: Tensor) -> Tensor:
        """As `_Shared.solve`."""
        return torch.cholesky_solve(x[..., None], self.factors)[..., 0]

    def traces(self, matrix: Tensor) -> Tensor:
        """As `_Shared.traces`."""
        return (torch.cholesky_inverse(self.factors) * matrix).sum(dim=(1, 2))


class _Diagonal:
    """The blocks' diagonals alone: an approximation."""

    def __init__(self, scales: Tensor, hessian: Tensor, precision: Tensor) -> None:
        self.diagonals = scales[:, None] * hessian.diagonal() + precision  # (N, k)

    def solve(self, x: Tensor) -> Tensor:
        """As `_Shared.solve`, of the diagonals."""
        return x / self.diagonals

    def traces(self, matrix: Tensor) -> Tensor:
        """As `_Shared.traces`, of the diagonals."""
        return (matrix.diagonal() / self.diagonals).sum(dim=1)
