"""Patches from one bit of every pixel, at places whose linear equations leave some directions open.

Of each token i the signs s_ik of y_ik - x_ik and the thresholds y_ik are known (`attacks.heads.sign_tokens`), not its
place. At place p a patch is x = rows_p + c B. For every token at every place the coefficients c (r,) that are likeliest
follow by Newton's method on a concave function,

    log P(signs | c) = sum_k log sigmoid(s_ik (y_ik - rows_pk - (c B)_k) / width) - |c|^2 / (2 deviation^2),

with a width that falls from one step to the next (signs are exact; the last width keeps the maximum defined). How
unlikely the token is at that place is minus the logarithm of the integral over c, by Laplace's approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Widths in normalised pixels, Newton steps at each, the longest of a step.
WIDTHS, NEWTON, LONGEST = (1.0, 0.5, 0.25, 0.1, 0.05), 10, 3.0
# Standard deviation of a coefficient, in normalised pixels.
DEVIATION = 3.0


@dataclass(frozen=True)
class OneBitFit:
    """Every token at every place.

    Attributes:
        coefficients: (T, N, r), c.
        surprise: (T, N), minus the logarithm of the probability of the token's signs.
    """

    coefficients: Tensor
    surprise: Tensor


def fit_signs(signs: Tensor, outputs: Tensor, rows: Tensor, basis: Tensor, deviation: float = DEVIATION) -> OneBitFit:
    """Fit every token to every place; see the module.

    Args:
        signs, outputs: (T, P), S and Y.
        rows: (N, P), what is known of the patches.
        basis: B, (r, P).
        deviation: of a coefficient.
    """
    margins = (outputs[:, None] - rows) * signs[:, None]  # (T, N, P), less what c adds
    found = margins.new_zeros(len(signs), len(rows), len(basis))
    ridge, eye = deviation**-2, torch.eye(len(basis)).to(basis)
    for width in WIDTHS:
        for _ in range(NEWTON):
            wrong, hessian = _curvature(margins, signs, basis, found, width)
            slope = -(wrong * signs[:, None] / width) @ basis.T - ridge * found
            step = torch.cholesky_solve(slope[..., None], torch.linalg.cholesky(hessian + ridge * eye))[..., 0]
            found = found + step * (LONGEST / step.norm(dim=-1, keepdim=True)).clamp(max=1)
    wrong, hessian = _curvature(margins, signs, basis, found, WIDTHS[-1])
    missed = -torch.log1p(-wrong.clamp(max=1 - 1e-12)).sum(dim=2) + ridge / 2 * found.square().sum(dim=2)
    root = torch.linalg.cholesky(hessian / ridge + eye)
    return OneBitFit(found, missed + root.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1))


def _curvature(
    margins: Tensor, signs: Tensor, basis: Tensor, coefficients: Tensor, width: float
) -> tuple[Tensor, Tensor]:
    """Probability of the opposite of each sign, (T, N, P), and the Hessian without the ridge, (T, N, r, r)."""
    wrong = torch.sigmoid(-(margins - (coefficients @ basis) * signs[:, None]) / width)
    weights = wrong * (1 - wrong) / width**2
    products = (basis[:, None] * basis).flatten(0, 1)  # (r r, P)
    return wrong, (weights @ products.T).unflatten(-1, (len(basis), len(basis)))


def likeliest(signs: Tensor, outputs: Tensor, like: Tensor) -> Tensor:
    """(T, P) patches with these signs (T, P) at these thresholds, as if drawn from the spread of others, (n, P)."""
    if len(like) < 2 or not len(signs):
        return outputs.clone()
    mean = like.mean(dim=0)
    _, sizes, directions = torch.linalg.svd(like - mean, full_matrices=False)
    scaled = directions * sizes[:, None] / (len(like) - 1) ** 0.5
    fitted = fit_signs(signs, outputs, mean[None], scaled, deviation=1.0)
    return mean + fitted.coefficients[:, 0] @ scaled


def chance(values: int) -> float:
    """Surprise of so many signs that nothing is known of."""
    return values * math.log(2)
