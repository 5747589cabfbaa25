"""The least expected error of an image that the noisy equations of its updates allow.

A client that adds noise N(0, sigma^2) to every entry sends G + F and S + E with S = G^T X (`attacks.closed_form`). The
factors g_d of a channel d are unknown too; with them eliminated the residual of a channel has the covariance
sigma^2 C, C = I + X^T X for patches X extended by the constant pixel (`attacks.linear.errors_in_variables`), and the
Fisher information on the patches is

    J = sum over updates t of  G_t G_t^T / sigma_t^2  (N, N)   x   K  (P, P),    K = the patches' block of C^-1.

J^-1 is the Cramer-Rao bound: no unbiased estimate from these equations is better in the mean. With pixels drawn from
independent normal distributions of variance tau^2 the information is J + I / tau^2 (van Trees 1968), for biased
estimates as well; J is taken at the true image. The mean square error is the trace of the inverse over the number of
pixels. Derived here for the linear equations; it is not the bound of reconstruction robustness for any mechanism (Balle
et al. 2022, Hayes et al. 2023).

What it does not cover: equations of other layers, and estimates that know more of photographs than the variance of a
pixel, such as total variation, which can be better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def least_error(factors: Sequence[Tensor], noises: Sequence[float], patches: Tensor, variance: float) -> float:
    """The least expected squared error of a pixel, in the units of `patches`.

    Args:
        factors: G_t, (N, D) without noise, of the updates that show the image.
        noises: sigma_t of each, above 0.
        patches: (N, P) of the image, as the model is fed (normalised).
        variance: tau^2 of a pixel; infinity for the Cramer-Rao bound alone.

    Raises:
        ValueError: no update, or not a noise above 0 for each.
    """
    if not factors or len(factors) != len(noises) or min(noises) <= 0:
        raise ValueError(f"{len(factors)} updates and {len(noises)} noises: each needs one above 0")
    strength = sum(g.double() @ g.double().T / sigma**2 for g, sigma in zip(factors, noises, strict=True))
    extended = torch.cat([patches, torch.ones_like(patches[:, :1])], dim=1).double()  # (N, P + 1)
    covariance = torch.eye(extended.shape[1]).to(extended) + extended.T @ extended
    kept = torch.linalg.inv(covariance)[:-1, :-1]  # K
    known = torch.linalg.eigvalsh(strength).clamp(min=0)[:, None] * torch.linalg.eigvalsh(kept)  # (N, P)
    return float((1 / (known + 1 / variance)).mean())
