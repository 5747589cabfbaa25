"""Structural similarity (Wang et al., 2004, eq. 13) with the original's Gaussian window.

The window is 11 x 11 with sigma 1.5, C1 = 0.01^2, C2 = 0.03^2, and the mean is over the pixels whose window lies inside
the image, over all channels. That is `skimage.metrics.structural_similarity(gaussian_weights=True, sigma=1.5,
use_sample_covariance=False, data_range=1, channel_axis=0)`. It is not torchmetrics' mean, which in recent releases
includes a border seen through reflected padding (its full map, cropped by 5, agrees). Own code for that reason, and
because float64 keeps cuDNN's TF32 away from the difference of squares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
        UsageError: an image is smaller than the window, or see `checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    if min(rec.shape[-2:]) < WINDOW:
        raise UsageError(f"SSIM needs images of at least {WINDOW} x {WINDOW} pixels, got {tuple(rec.shape[-2:])}")
    moments = torch.stack([rec, orig, rec * rec, orig * orig, rec * orig])  # (5, B, C, H, W)
    mean_r, mean_o, square_r, square_o, product = _windowed_means(moments)  # each (B, C, H - 10, W - 10)
    variances = (square_r - mean_r**2) + (square_o - mean_o**2)
    covariance = product - mean_r * mean_o
    luminance = (2 * mean_r * mean_o + C1) / (mean_r**2 + mean_o**2 + C1)
    structure = (2 * covariance + C2) / (variances + C2)
    return (luminance * structure).mean(dim=(1, 2, 3)).float()


def _windowed_means(images: Tensor) -> Tensor:
    """Gaussian means over every window that fits: (..., H, W) -> (..., H - 10, W - 10)."""
    offsets = torch.arange(WINDOW, dtype=images.dtype, device=images.device) - WINDOW // 2
    weights = torch.exp(-0.5 * (offsets / SIGMA) ** 2)
    weights = weights / weights.sum()  # (11,)
    planes = images.flatten(0, -3).unsqueeze(1)  # (N, 1, H, W)
    rows = F.conv2d(planes, weights.view(1, 1, WINDOW, 1))
    means = F.conv2d(rows, weights.view(1, 1, 1, WINDOW))
    return means.squeeze(1).unflatten(0, images.shape[:-2])
