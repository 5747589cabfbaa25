"""What settles the directions that no equation reaches.

Total variation first: among all images that fit the equations, the one whose neighbouring pixels differ least.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def total_variation(images: Tensor, smoothing: float) -> Tensor:
    """Anisotropic total variation of (B, C, H, W) images, smoothed: sum of sqrt(difference^2 + smoothing^2)."""
    down = images[..., 1:, :] - images[..., :-1, :]
    right = images[..., :, 1:] - images[..., :, :-1]
    return (down.square() + smoothing**2).sqrt().sum() + (right.square() + smoothing**2).sqrt().sum()


def least_variation(
    render: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    smoothing: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4),
    iterations: int = 150,
) -> Tensor:
    """Coefficients of the image of least total variation, by L-BFGS with decreasing smoothing.

    Args:
        render: affine map from coefficients to images (B, C, H, W), differentiable.
        start: initial coefficients, float64.
        smoothing: rounding of |.| at zero, in units of the rendered image, from coarse to fine; the objective is
            convex, so each stage only warms up the next.
        iterations: L-BFGS iterations a stage.

    Returns:
        Coefficients of the shape of `start`.
    """
    coefficients = start.detach().clone().requires_grad_(True)
    for width in smoothing:
        optimiser = torch.optim.LBFGS(
            [coefficients], max_iter=iterations, history_size=20, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
        )

        def closure(optimiser: torch.optim.LBFGS = optimiser, width: float = width) -> Tensor:
            optimiser.zero_grad()
            loss = total_variation(render(coefficients), width)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
    return coefficients.detach()
