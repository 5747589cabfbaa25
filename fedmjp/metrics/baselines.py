"""The guesses that need no gradient: an attack that does not beat them has not worked."""

from __future__ import annotations

from torch import Tensor

MEAN_IMAGE, OTHER_IMAGE = "mean_image", "other_image"


def mean_image(images: Tensor) -> Tensor:
    """Mean of (B, C, H, W) images; (1, C, H, W)."""
    return images.mean(dim=0, keepdim=True)


def other_image(images: Tensor) -> Tensor:
    """For each of (B, C, H, W) images another one of them; B > 1."""
    return images.roll(1, dims=0)
