"""All metrics of a reconstruction at once, and what a table must know to print them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedmjp.metrics.perceptual import Lpips
from fedmjp.metrics.pixel import mse, patch_recovery, psnr
from fedmjp.metrics.spectrum import fft2d, fft2d_official
from fedmjp.metrics.ssim import WINDOW, ssim


@dataclass(frozen=True)
class Direction:
    """How to read a metric: which way is more private, and its table header with its unit where it has one."""

    higher_is_more_private: bool
    label: str


METRIC_DIRECTIONS: dict[str, Direction] = {
    "mse": Direction(True, "MSE"),
    "psnr": Direction(False, "PSNR (dB)"),
    "ssim": Direction(False, "SSIM"),
    "fft2d": Direction(True, "FFT2D"),
    "fft2d_official": Direction(True, "FFT2D (official)"),
    "lpips": Direction(True, "LPIPS"),
    "patch_recovery": Direction(False, "patches > 25 dB (share)"),
}


def score(
    reconstruction: Tensor, original: Tensor, *, patch_size: int, lpips: Lpips | None = None
) -> dict[str, Tensor]:
    """Every metric of a batch of reconstructions.

    Args:
        reconstruction, original: (B, C, H, W) floating, in [0, 1], on one device.
        patch_size: side of the model's patches in pixels; divides H and W.
        lpips: what `load_lpips` returned; None leaves that metric empty.

    Returns:
        metric -> (B,) float32 on the images' device, in the order of `METRIC_DIRECTIONS`. NaN stands where a metric
        does not exist: `ssim` for images under 11 pixels, `lpips` without weights or below its trunk's smallest side.

    Raises:
        UsageError: see `checked_pair` and `patch_recovery`.
    """
    errors = mse(reconstruction, original)
    side = min(original.shape[-2:])
    empty = errors.new_full(errors.shape, float("nan"))
    return {
        "mse": errors,
        "psnr": psnr(reconstruction, original),
        "ssim": ssim(reconstruction, original) if side >= WINDOW else empty.clone(),
        "fft2d": fft2d(reconstruction, original),
        "fft2d_official": fft2d_official(reconstruction, original),
        "lpips": lpips(reconstruction, original) if lpips and side >= lpips.smallest_side else empty.clone(),
        "patch_recovery": patch_recovery(reconstruction, original, patch_size),
    }
