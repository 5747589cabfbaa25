"""Pixel metrics: mean squared error, PSNR, and the share of recovered patches, in their places or in any."""

from __future__ import annotations

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torch.nn import functional as F

from attacks.registry import UsageError
from fedmjp.metrics.pairs import checked_pair

# Keeps the PSNR of identical images finite (120 dB), so that means over images are finite.
LEAST_MSE = 1e-12
# Rounding to 8 bits has a mean squared error of 1 / (12 * 255^2), which is 58.9 dB.
EXACT_8_BIT = 59.0  # dB


def mse(reconstruction: Tensor, original: Tensor) -> Tensor:
    """Mean squared error of (B, C, H, W) images in [0, 1]; (B,) float32, in [0, 1].

    Raises:
        UsageError: see `pairs.checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    return (rec - orig).square().flatten(1).mean(dim=1).float()


def psnr(reconstruction: Tensor, original: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of (B, C, H, W) images in [0, 1]; (B,) float32, in dB for a peak of 1, at most 120.

    Raises:
        UsageError: see `pairs.checked_pair`.
    """
    rec, orig = checked_pair(reconstruction, original)
    error = (rec - orig).square().flatten(1).mean(dim=1)
    return _decibels(error).float()


def psnr_in_words(psnr: float) -> str:
    """A PSNR (dB) as a sentence gives it: to 0.1 dB, or as exact where the error is below that of rounding to 8 bits.

    Tables give the number at any size.
    """
    return f"{psnr:.1f} dB" if psnr <= EXACT_8_BIT else f">{EXACT_8_BIT:.0f} dB (8-bit exact)"


def patch_recovery(reconstruction: Tensor, original: Tensor, patch_size: int, threshold_db: float = 25.0) -> Tensor:
    """Share of patches whose PSNR exceeds `threshold_db`; (B,) float32, in [0, 1].

    Args:
        reconstruction, original: (B, C, H, W) in [0, 1].
        patch_size: side of a patch in pixels.
        threshold_db: in dB.

    Raises:
        UsageError: the image cannot be divided into patches of `patch_size` pixels; see also `pairs.checked_pair`.
    """
    rec, orig = _divisible_pair(reconstruction, original, patch_size)
    squares = (rec - orig).square().mean(dim=1, keepdim=True)
    error = F.avg_pool2d(squares, patch_size).flatten(1)  # (B, N)
    return (_decibels(error) > threshold_db).double().mean(dim=1).float()


def any_place(reconstruction: Tensor, original: Tensor, patch_size: int, threshold_db: float = 25.0) -> Tensor:
    """Share of the original's patches that the reconstruction holds in any place; (B,) float32, in [0, 1].

    A patch of the reconstruction counts for one of the original: the patches are paired by maximum bipartite matching,
    of those pairs whose PSNR exceeds `threshold_db`. A reconstruction with an image of NaN scores 0.

    Args:
        reconstruction, original: (B, C, H, W) in [0, 1].
        patch_size: side of a patch in pixels.
        threshold_db: in dB.

    Raises:
        UsageError: as `patch_recovery` does.
    """
    pair = _divisible_pair(reconstruction, original, patch_size)
    rec, orig = (F.unfold(images, patch_size, stride=patch_size).mT for images in pair)  # (B, N, P)
    error = torch.cdist(rec, orig).square() / rec.shape[-1]
    alike = (_decibels(error) > threshold_db).cpu().numpy()  # (B, N of the reconstruction, N of the original)
    paired = [(maximum_bipartite_matching(csr_array(own)) >= 0).mean() for own in alike]
    return torch.tensor(paired, device=original.device).float()


def _divisible_pair(reconstruction: Tensor, original: Tensor, patch_size: int) -> tuple[Tensor, Tensor]:
    rec, orig = checked_pair(reconstruction, original)
    if patch_size < 1 or original.shape[-1] % patch_size or original.shape[-2] % patch_size:
        raise UsageError(
            f"{original.shape[-2]} x {original.shape[-1]} pixels do not divide into patches of {patch_size}"
        )
    return rec, orig


def _decibels(error: Tensor) -> Tensor:
    return -10 * error.clamp(min=LEAST_MSE).log10()
