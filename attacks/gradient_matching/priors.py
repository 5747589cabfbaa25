"""Priors on the images sought: parts that an attack composes.

Each is a frozen dataclass called with normalised candidates (V, R, B, C, H, W), victims by restarts by images of the
batch, and answers a number a lane, (V, R). `begins` is the share of the run before which it is left out.

Left out are the priors that need a second network: distances to the batch-norm statistics of a pretrained CNN
(GradInversion, GradViT). A ViT has no such statistics of its own, and no such CNN comes with this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Prior(Protocol):
    """What makes a candidate unlikely."""

    begins: float

    def __call__(self, images: Tensor) -> Tensor:
        """(V, R, B, C, H, W) -> (V, R)."""


@dataclass(frozen=True)
class TotalVariation:
    """scale times the mean absolute difference of neighbouring pixels, both directions added."""

    scale: float
    begins: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(2).mean(dim=2)
        right = (images[..., 1:] - images[..., :-1]).abs().flatten(2).mean(dim=2)
        return self.scale * (down + right)


@dataclass(frozen=True)
class SmallNorm:
    """scale times half the mean square of normalised pixels (GradInversion's l2 prior)."""

    scale: float
    begins: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        return 0.5 * self.scale * images.flatten(2).square().mean(dim=2)


@dataclass(frozen=True)
class PatchBorders:
    """scale times the lengths of the jumps across patch borders (GradViT's patch prior), a mean over borders.

    Args:
        patch_size: p in pixels.
    """

    scale: float
    patch_size: int
    begins: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        p = self.patch_size
        down = images[..., p::p, :] - images[..., p - 1 : -1 : p, :]  # (V, R, B, C, H/p - 1, W)
        right = images[..., p::p] - images[..., p - 1 : -1 : p]
        jumps = down.square().mean(dim=(3, 4, 5)) + right.square().mean(dim=(3, 4, 5))  # (V, R, B)
        return self.scale * (jumps + 1e-12).sqrt().mean(dim=2)


@dataclass(frozen=True)
class GroupConsistency:
    """scale times the mean square distance to the mean over the restarts (GradInversion, equation 10).

    Departs from the paper: the restarts are averaged as they are, without registration. A ViT's patches do not drift.
    """

    scale: float
    begins: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        centre = images.detach().mean(dim=1, keepdim=True)
        return self.scale * (images - centre).flatten(2).square().mean(dim=2)
