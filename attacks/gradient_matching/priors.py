"""Priors on the candidate images: parts that an attack composes.

Each is a frozen dataclass. Called with normalised candidates (V, R, B, C, H, W), that is victims by restarts by images
of the batch, it returns one number per search, (V, R). `active_from` is the share of the run, in [0, 1], before which
the prior is not used. `scale` is the prior's weight.

Priors that need a second network are not implemented: distances to the batch-norm statistics of a pretrained CNN
(GradInversion, GradViT). A ViT has no such statistics of its own, and this package includes no such CNN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Prior(Protocol):
    """A penalty on unlikely candidates."""

    active_from: float

    def __call__(self, images: Tensor) -> Tensor:
        """The penalty per search: (V, R, B, C, H, W) -> (V, R)."""


@dataclass(frozen=True)
class TotalVariation:
    """scale times the mean absolute difference of neighbouring pixels, summed over both directions."""

    scale: float
    active_from: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(2).mean(dim=2)
        right = (images[..., 1:] - images[..., :-1]).abs().flatten(2).mean(dim=2)
        return self.scale * (down + right)


@dataclass(frozen=True)
class SmallNorm:
    """scale times half the mean square of normalised pixels (GradInversion's l2 prior)."""

    scale: float
    active_from: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        return 0.5 * self.scale * images.flatten(2).square().mean(dim=2)


@dataclass(frozen=True)
class PatchBorders:
    """scale times the root mean square jump across patch borders, averaged over images (GradViT's patch prior).

    Args:
        patch_size: side p of a patch in pixels.
    """

    scale: float
    patch_size: int
    active_from: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        p = self.patch_size
        down = images[..., p::p, :] - images[..., p - 1 : -1 : p, :]  # (V, R, B, C, H/p - 1, W)
        right = images[..., p::p] - images[..., p - 1 : -1 : p]
        # (V, R, B); zero in a direction in which an image is one patch
        jumps = sum(d.square().sum(dim=(3, 4, 5)) / max(d[0, 0, 0].numel(), 1) for d in (down, right))
        return self.scale * (jumps + 1e-12).sqrt().mean(dim=2)


@dataclass(frozen=True)
class GroupConsistency:
    """scale times the mean square distance to the mean over the restarts (GradInversion, equation 10).

    Departs from the paper: the restarts are averaged without registration, because a ViT's patches do not shift.
    """

    scale: float
    active_from: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        """See `Prior`."""
        centre = images.detach().mean(dim=1, keepdim=True)
        return self.scale * (images - centre).flatten(2).square().mean(dim=2)
