"""How alike an original and its reconstruction are: batched, on the device, each checked against a peer.

`score` gives every metric of a results row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.metrics.baselines import MEAN_IMAGE, OTHER_IMAGE, mean_image, other_image
from fedmjp.metrics.intervals import Interval, bootstrap_mean, bootstrap_statistic, t_interval
from fedmjp.metrics.perceptual import Lpips, load_lpips
from fedmjp.metrics.pixel import mse, patch_recovery, psnr
from fedmjp.metrics.spectrum import fft2d, fft2d_official
from fedmjp.metrics.ssim import WINDOW, ssim


@dataclass(frozen=True)
class Direction:
    """How to read a metric's column."""

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
    """Every metric of (B, C, H, W) images in [0, 1], (B,) each, in the order of `METRIC_DIRECTIONS`.

    LPIPS is NaN without its network or on images too small for it, SSIM on images smaller than its window (11).
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
    "score",
    "ssim",
]
