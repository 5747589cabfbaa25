"""Similarity of reconstructions and originals: batched metrics on the images' device, tested against other packages.

`score` computes all metrics of a results row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.metrics.baselines import MEAN_IMAGE, OTHER_IMAGE, mean_image, other_image
from fedmjp.metrics.intervals import Interval, bootstrap_mean, bootstrap_statistic, t_interval
from fedmjp.metrics.perceptual import Lpips, load_lpips
from fedmjp.metrics.pixel import any_place, mse, patch_recovery, psnr, psnr_in_words
from fedmjp.metrics.spectrum import fft2d, fft2d_official
from fedmjp.metrics.ssim import WINDOW, ssim


@dataclass(frozen=True)
class Direction:
    """Presentation of a metric's column.

    Attributes:
        label: for table headers, with the unit.
        higher_is_more_private: whether a larger value means less leakage.
    """

    label: str
    higher_is_more_private: bool


METRIC_DIRECTIONS: Mapping[str, Direction] = {
    "mse": Direction("MSE", True),
    "psnr": Direction("PSNR (dB)", False),
    "ssim": Direction("SSIM", False),
    "fft2d": Direction("FFT-2D", True),
    "fft2d_official": Direction("FFT-2D (official)", True),
    "lpips": Direction("LPIPS", True),
    "patch_recovery": Direction("Patches > 25 dB (share)", False),
}


def score(
    reconstruction: Tensor,
    original: Tensor,
    *,
    patch_size: int,
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """All metrics, (B,) each, in the order of `METRIC_DIRECTIONS`.

    LPIPS is NaN without its network and on images too small for it, SSIM is NaN on images smaller than its window (11
    pixels).

    Args:
        reconstruction, original: (B, C, H, W) in [0, 1].
        patch_size: side of a patch in pixels, for `patch_recovery`.
        lpips: the LPIPS metric, from `load_lpips`.

    Raises:
        UsageError: see `pairs.checked_pair` and `patch_recovery`.
    """
    missing = torch.full((len(original),), float("nan"), device=original.device)
    values = {
        "mse": mse(reconstruction, original),
        "psnr": psnr(reconstruction, original),
        "ssim": ssim(reconstruction, original) if min(original.shape[-2:]) >= WINDOW else missing,
        "fft2d": fft2d(reconstruction, original),
        "fft2d_official": fft2d_official(reconstruction, original),
        "lpips": missing if lpips is None else lpips(reconstruction, original),
        "patch_recovery": patch_recovery(reconstruction, original, patch_size),
    }
    return {name: values[name] for name in METRIC_DIRECTIONS}


__all__ = [
    "MEAN_IMAGE",
    "METRIC_DIRECTIONS",
    "OTHER_IMAGE",
    "Direction",
    "Interval",
    "Lpips",
    "any_place",
    "bootstrap_mean",
    "bootstrap_statistic",
    "t_interval",
    "fft2d",
    "fft2d_official",
    "load_lpips",
    "mean_image",
    "mse",
    "other_image",
    "patch_recovery",
    "psnr",
    "psnr_in_words",
    "score",
    "ssim",
]
