"""Validation of the pair (reconstruction, original) that every metric receives."""

from __future__ import annotations

from torch import Tensor

from attacks.registry import UsageError


def checked_pair(reconstruction: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair detached and in float64, so that no metric uses TF32 or loses digits in a difference of squares.

    Args:
        reconstruction: (B, C, H, W), floating point, values expected in [0, 1] (not enforced: an attack may or may not
            clamp its images).
        original: the same shape and device.

    Returns:
        The two tensors, (B, C, H, W) float64, on their device.

    Raises:
        UsageError: the shapes differ, are not (B, C, H, W) or are empty, the devices differ, or a tensor is not
            floating point (the scores of an image in 0..255 would be meaningless).
    """
    for name, images in (("reconstruction", reconstruction), ("original", original)):
        if images.ndim != 4 or images.numel() == 0:
            raise UsageError(f"{name} has shape {tuple(images.shape)}: pass a non-empty (B, C, H, W)")
        if not images.is_floating_point():
            raise UsageError(f"{name} is {images.dtype}: pass floating images in [0, 1]")
    if reconstruction.shape != original.shape:
        raise UsageError(f"reconstruction {tuple(reconstruction.shape)} and original {tuple(original.shape)} differ")
    if reconstruction.device != original.device:
        raise UsageError(f"reconstruction is on {reconstruction.device} and original on {original.device}")
    return reconstruction.detach().double(), original.detach().double()
