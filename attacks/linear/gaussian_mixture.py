"""Mixtures of Gaussians of mean zero, fitted by expectation and maximisation (Dempster, Laird and Rubin 1977)."""

from __future__ import annotations

import torch
from torch import Tensor


def fit_gaussians(points: Tensor, shares: Tensor, iterations: int, floor: float) -> tuple[Tensor, Tensor]:
    """Weights (K,) and lower Cholesky factors (K, d, d) of the covariances.

    Args:
        points: (n, d).
        shares: (n, K), of each point's in every component, to begin with.
        iterations: of expectation and maximisation.
        floor: added to every variance.
    """
    for _ in range(iterations):
        weights, roots = _maximise(points, shares, floor)
        shares = log_densities(points, weights, roots).softmax(dim=1)
    return weights, roots


def _maximise(points: Tensor, shares: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    covariances = torch.stack([(points * own[:, None]).T @ points / own.sum() for own in shares.T])
    diagonal = floor * torch.eye(points.shape[1], dtype=points.dtype)
    return shares.mean(dim=0), torch.linalg.cholesky(covariances + diagonal)


def log_densities(points: Tensor, weights: Tensor, roots: Tensor) -> Tensor:
    """(n, K): log of weight and density, up to a constant."""
    scores = []
    for weight, root in zip(weights, roots, strict=True):
        whitened = torch.linalg.solve_triangular(root, points.T, upper=False)  # (d, n)
        scores.append(weight.log() - root.diagonal().log().sum() - whitened.square().sum(dim=0) / 2)
    return torch.stack(scores, dim=1)
