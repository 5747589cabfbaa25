"""Structural similarity (Wang et al., 2004, eq. 13) with the original's Gaussian window.

The window is 11 x 11 with sigma 1.5, C1 = 0.01^2, C2 = 0.03^2, and the mean is over the pixels whose window lies inside
the image, over all channels. This equals `skimage.metrics.structural_similarity(gaussian_weights=True, sigma=1.5,
use_sample_covariance=False, data_range=1, channel_axis=0)`. It differs from torchmetrics' mean, which in recent
releases includes a border computed with reflected padding (its full map, cropped by 5, is equal). Therefore it is
implemented here, in float64 because of the difference of squares, and without convolutions, which are slow in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attacks.registry import UsageError
from fedmjp.metrics.pairs import checked_pair

WINDOW = 11
SIGMA = 1.5
C1 = 0.01**2
C2 = 0.03**2


def ssim(reconstruction: Tensor, original: Tensor) -> Tensor:
    """Structural similarity, mean over channels and pixels, data range 1.

    Args:
        reconstruction, original: (B, C, H, W) floating, in [0, 1], H and W at least 11 pixels.

    Returns:
        (B,) float32 in [-1, 1]; 1 for identical images.

    Raises:
        UsageError: an image is smaller than the window; see also `pairs.checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    if min(rec.shape[-2:]) < WINDOW:
        raise UsageError(f"SSIM needs images of at least {WINDOW} x {WINDOW} pixels, got {tuple(rec.shape[-2:])}")
    # On a CPU the moments of one image fit into the cache, those of a batch do not: one by one is four times as fast.
    size = 1 if rec.device.type == "cpu" else len(rec)
    pairs = zip(rec.split(size), orig.split(size), strict=True)
    return torch.cat([_ssim(r, o) for r, o in pairs]).float()


def _ssim(rec: Tensor, orig: Tensor) -> Tensor:
    moments = torch.stack([rec, orig, rec * rec + orig * orig, rec * orig])  # (4, B, C, H, W)
    mean_r, mean_o, squares, product = _windowed_means(moments)  # each (B, C, H - 10, W - 10)
    squared, crossed = mean_r**2 + mean_o**2, mean_r * mean_o
    luminance = (2 * crossed + C1) / (squared + C1)
    structure = (2 * (product - crossed) + C2) / (squares - squared + C2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def _windowed_means(images: Tensor) -> Tensor:
    """Gaussian means over every window that fits: (..., H, W) -> (..., H - 10, W - 10)."""
    return _means_along(_means_along(images, -1), -2)


def _means_along(images: Tensor, dim: int) -> Tensor:
    """Weighted sums of shifted copies along one dimension, where the two halves of the window share their weights."""
    weights = [math.exp(-0.5 * (k / SIGMA) ** 2) for k in range(WINDOW // 2 + 1)]
    total = weights[0] + 2 * sum(weights[1:])
    middle, length = WINDOW // 2, images.shape[dim] - WINDOW + 1
    means = images.narrow(dim, middle, length) * (weights[0] / total)
    for k in range(1, middle + 1):
        sides = images.narrow(dim, middle - k, length) + images.narrow(dim, middle + k, length)
        means.add_(sides, alpha=weights[k] / total)
    return means
