"""Views of one image that a client's augmentation makes by maps that are linear on its patches.

Three things that augmentation does keep patches patches, so that one update's equations become another's by a change of
coordinates (`attacks.linear.normal_equations`):

*Mirroring* exchanges the columns of the grid and, within every patch, its columns of pixels.

*Shifts by whole patches* renumber places. Patches that leave the frame have no equation, ones that enter belong to no
patch of the target.

*Colour maps*: each pixel's channels c become W c + d, with the same (C, C) matrix W and the same d everywhere:
brightness (W = a I), contrast (W = a I with d = (1 - a) m, m the image's mean grey), saturation and every other mixing
of channels.

All other augmentation makes new patches: shifts and crops by other numbers of pixels, resizing (RandomResizedCrop),
rotations by odd angles, and colour maps that are not affine (hue, gamma, clipping at black and white, rounding to 8
bits). Their views are not joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attacks.linear.normal_equations import NormalEquations
from attacks.tokenizer import Tokenizer


def mirror(patches: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Mirror every patch in itself: (..., C p p) -> (..., C p p), columns of pixels reversed."""
    return patches.unflatten(-1, (tokenizer.channels, -1, tokenizer.patch_size)).flip(-1).flatten(-3)


def mix_channels(patches: Tensor, mix: Tensor) -> Tensor:
    """W c for each pixel's channels c: (..., C p p) -> (..., C p p), W (C, C)."""
    return (mix @ patches.unflatten(-1, (len(mix), -1))).flatten(-2)


def mean_colours(tokenizer: Tokenizer) -> Tensor:
    """The patches of one colour, (C, P) orthonormal."""
    pixels = tokenizer.patch_dim // tokenizer.channels
    return torch.eye(tokenizer.channels).double().repeat_interleave(pixels, dim=1) / pixels**0.5


@dataclass(frozen=True)
class View:
    """How the target's patches x_p follow from those of an update's image, y_q.

        x_p = W m(y_q) + d,        q = source_p, m mirrors where `mirrored`

    Attributes:
        source: (N,) int64, the update's place q of each patch p of the target; -1 where its image does not hold p.
        mirrored: the update's image is mirrored left to right.
        mix: W, (C, C) float64.
        offset: d, (C,) float64.
    """

    source: Tensor
    mirrored: bool
    mix: Tensor
    offset: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: Tensor, *, mirrored: bool = False) -> View:
        """The view with unchanged colours."""
        channels = tokenizer.channels
        return cls(source, mirrored, torch.eye(channels).double(), torch.zeros(channels).double())

    @property
    def plain(self) -> bool:
        """Whether the update shows the target's image as it is."""
        return self.still and not self.mirrored and self.keeps_colours

    @property
    def still(self) -> bool:
        """Whether every patch has its own place."""
        return bool((self.source == torch.arange(len(self.source)).to(self.source)).all())

    @property
    def keeps_colours(self) -> bool:
        """Whether W = I and d = 0."""
        return not self.offset.any() and bool((self.mix == torch.eye(len(self.mix)).to(self.mix)).all())

    def flags(self, values: Tensor) -> Tensor:
        """(N,) bool of the update's places at the target's places; False where its image does not hold them."""
        return (self.source >= 0) & values[self.source]

    def moved(self, equations: NormalEquations, tokenizer: Tokenizer) -> NormalEquations:
        """The update's equations as equations for the target's patches: y = m(W^-1 (x - d))."""
        if not self.keeps_colours or self.mirrored:
            unit = torch.eye(tokenizer.patch_dim).to(equations.targets)
            inverse = torch.linalg.inv(self.mix.to(unit))
            linear = mix_channels(mirror(unit, tokenizer) if self.mirrored else unit, inverse).T  # M, (P, P)
            constant = self.offset.to(unit).repeat_interleave(tokenizer.patch_dim // len(self.offset))
            equations = equations.transformed(linear, -(linear @ constant))
        return equations if self.still else equations.renumbered(self.source)


def places(grid: tuple[int, int], mirrored: bool, shift: tuple[int, int]) -> Tensor:
    """(N,) int64: for each place of the target the place in the view; -1 outside of it.

    Args:
        grid: patches (rows, columns).
        mirrored: the view is mirrored left to right.
        shift: the target's patch at (r, c) stands at (r, c) + shift before the view is mirrored.
    """
    rows, columns = grid
    r = torch.arange(rows)[:, None] + shift[0]
    c = torch.arange(columns)[None] + shift[1]
    inside = (r >= 0) & (r < rows) & (c >= 0) & (c < columns)
    c = columns - 1 - c if mirrored else c
    return torch.where(inside, r * columns + c, -1).flatten()


@cache
def all_shifts(grid: tuple[int, int], mirrored: bool, farthest: int) -> Tensor:
    """(S, N) int64: `places` for all shifts by at most so many patches in each direction, the nearest first."""
    reach = [range(-min(farthest, n - 1), min(farthest, n - 1) + 1) for n in grid]
    ordered = sorted(((a, b) for a in reach[0] for b in reach[1]), key=lambda s: s[0] ** 2 + s[1] ** 2)
    return torch.stack([places(grid, mirrored, shift) for shift in ordered])
