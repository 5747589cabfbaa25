"""Combinations of patches that the equations leave uncertain (null space and noise), settled by an image prior.

Where there are more patches than channels, where a position gradient is badly conditioned, or where a gradient is
noisy, the solve of G^T X = S leaves X + F C open: F (N, f) orthonormal combinations of patches, C (f, P) with a
standard error that the solve gives (infinite in the null space of G^T). The prior is that of
`attacks.linear.image_prior`; here the unknown multiplies from the left, the same few combinations for every pixel:

    minimise over C:  sum_iq (C_iq - o_iq)^2 / (2 deviation_i^2)  +  prior(X + F C),

where X is the linear estimate, in which uncertain combinations are shrunk towards zero, and o the part removed by that:
o_i / deviation_i^2 = F_i^T X.

The Hessian of the whole is about M x K x L + diag(deviation^-2): M = F^T diag(mean weight of each patch) F, K the
channels' mixing into luma and chroma, L the Laplacian of one patch among fixed neighbours. All are small, and the
inverse of the sum preconditions the conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attacks.linear.image_prior import VectorialVariation, adjoint, colour_of, conjugate_gradients, differences
from attacks.linear.least_squares import RowSolution
from attacks.tokenizer import Tokenizer


def settle_rows(
    solution: RowSolution, tokenizer: Tokenizer, std: tuple[float, ...], prior: VectorialVariation
) -> Tensor:
    """Rows (N, P) of the solution, its weak combinations settled.

    Args:
        std: per-channel normalisation, to render in [0, 1].
    """
    if not solution.weak.shape[1]:
        return solution.rows
    scene = _Scene(solution, tokenizer, std)
    start = solution.rows.new_zeros(solution.weak.shape[1], tokenizer.channels, tokenizer.patch_size**2)
    return solution.rows + solution.weak @ prior.reweighted(scene, start).flatten(1)


class _Scene:
    """The image as a function of coefficients (f, C, p p) in normalised pixels."""

    def __init__(self, solution: RowSolution, tokenizer: Tokenizer, std: tuple[float, ...]) -> None:
        self.tokenizer, self.channels = tokenizer, tokenizer.channels
        self.weak = solution.weak  # (N, f)
        self.precision = solution.deviation.square().reciprocal()[:, None, None]  # (f, 1, 1), 0 where free
        self.pull = (self.weak.T @ solution.rows).unflatten(1, (self.channels, -1))  # o / deviation^2, (f, C, p p)
        self.colour = colour_of(self.channels, std).to(solution.rows)  # (C, C)
        self.start = self._paint(solution.rows)  # (C, H, W)
        self.mixing, self.hues = torch.linalg.eigh(self.colour.T @ self.colour)  # (C,), (C, C)
        laplacian = _laplacian(tokenizer.patch_size).to(solution.rows)
        self.stiffness, self.modes = torch.linalg.eigh(laplacian)  # (p p,), (p p, p p)

    def gradient(self, shift: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scene.gradient`."""
        return differences(self.start + self._paint(self.weak @ shift.flatten(1)))

    def step(self, shift: Tensor, weights: Tensor, iterations: int, tolerance: float) -> Tensor:
        """See `Scene.step`."""

        def hessian(x: Tensor) -> Tensor:
            """Second derivative of the weighted problem, applied to x (f, C, p p)."""
            down, right = differences(self._paint(self.weak @ x.flatten(1)))
            return self._pull(weights * down, weights * right) + self.precision * x

        down, right = differences(self.start)
        target = self.pull - self._pull(weights * down, weights * right)
        precondition = self._preconditioner(weights)
        return conjugate_gradients(hessian, target, shift, precondition, iterations, tolerance)

    def _preconditioner(self, weights: Tensor) -> Callable[[Tensor], Tensor]:
        """x -> (M x K x L + precision)^-1 x, by the eigenvectors of K, of L, and of M against the precision."""
        mean = self.tokenizer.patchify(weights[None, None])[0].mean(dim=1)  # (N,)
        factor = torch.linalg.cholesky(self.weak.T @ (mean[:, None] * self.weak))  # M = R R^T, (f, f)
        half = torch.linalg.solve_triangular(factor, torch.diag(self.precision.flatten()), upper=False)
        whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)  # R^-1 precision R^-T
        known, turn = torch.linalg.eigh((whitened + whitened.T) / 2)
        turn = torch.linalg.solve_triangular(factor.T, turn, upper=True)  # R^-T Q, (f, f)
        inverse = 1 / (self.mixing[:, None] * self.stiffness + known.clamp(min=0)[:, None, None])  # (f, C, p p)

        def precondition(x: Tensor) -> Tensor:
            """The inverse, applied to x (f, C, p p)."""
            turned = torch.einsum("ij,icq,cd->jdq", turn, x, self.hues) @ self.modes
            return torch.einsum("ij,jdq,cd->icq", turn, (turned * inverse) @ self.modes.T, self.hues)

        return precondition

    def _paint(self, patches: Tensor) -> Tensor:
        """(N, P) normalised -> (C, H, W) luma and chroma."""
        painted = self.colour @ patches.unflatten(1, (self.channels, -1))
        return self.tokenizer.unpatchify(painted.flatten(1)[None])[0]

    def _pull(self, down: Tensor, right: Tensor) -> Tensor:
        """Adjoint of differences, painting and combining: (f, C, p p)."""
        cut = self.tokenizer.patchify(adjoint(down, right)[None])[0].unflatten(1, (self.channels, -1))  # (N, C, p p)
        return (self.weak.T @ (self.colour.T @ cut).flatten(1)).unflatten(1, (self.channels, -1))


def _laplacian(size: int) -> Tensor:
    """Squared differences of a (size, size) patch and of its borders to neighbours that stay fixed, (p p, p p)."""
    line = 2 * torch.eye(size) - torch.diag(torch.ones(size - 1), 1) - torch.diag(torch.ones(size - 1), -1)
    unit = torch.eye(size)
    return torch.kron(line, unit) + torch.kron(unit, line)
