"""Baseline reconstructions that need no gradient: an attack that is not better than both has failed."""

from __future__ import annotations

from torch import Tensor

from attacks.registry import UsageError

MEAN_IMAGE, OTHER_IMAGE = "mean_image", "other_image"


def mean_image(images: Tensor) -> Tensor:
    """Mean over a batch of images: (B, C, H, W) -> (1, C, H, W)."""
    return images.mean(dim=0, keepdim=True)


def other_image(images: Tensor) -> Tensor:
    """For each of (B, C, H, W) images another image of the batch: (B, C, H, W), rolled by one.

    Raises:
        UsageError: fewer than two images.
    """
    if len(images) < 2:
        raise UsageError(f"another image needs a set of at least 2, not {len(images)}")
    return images.roll(1, dims=0)
