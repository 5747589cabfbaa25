"""The row space of an image's patches, and which other updates' row spaces agree with it.

dL/dE = G^T X has the image's patches for a row space, whatever the weights, and jigsawing only reorders them: an update
of the same image leaves nothing but noise outside the target's row space, an update of another image leaves a part of
that image there.

*Colours.* If each pixel's channels c of the update's image are W^-1 (c - d), its patches without their mean colours (P
- C directions: d drops out, and so does the constant pixel of dL/db) are those of the target with channels mixed by
W^-1. So with S~ the update's products without mean colours, and Q the directions that the target's have not, W makes

    |S~ (W x I)^T Q|^2 = w O w        w the C^2 entries of W, O (C^2, C^2)

noise, and other photographs have no such W but ill-conditioned ones. W = (O + mu)^-k I with a small mu is that W, up to
a factor; where there are several (a grey image is blind to some of W), it is the one next to the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.linear.intervals import LEAST_SHARE, largest_share_of_same_image
from attacks.linear.position_rows import PositionRows
from attacks.linear.views import mirror, mix_channels

# With colours fitted, an update shows the target's image where the share of it outside the target's row space is below
# the geometric mean of the noise and this; other photographs leave 0.2 and more under a W of an allowed condition.
OTHER_SHARE_MIXED = 5e-2
# Largest condition of W: saturation changed by a factor of 3 has 3.
LARGEST_CONDITION = 10.0
# Sine of the angle below which a direction of one row space is one of another.
COMMON_DIRECTION = 1e-3
# Combinations of an update's rows that are looked at first.
SKETCH = 32
# Solves by which W is freed of what does not fit.
TURNS = 2


@dataclass(frozen=True)
class RowSpace:
    """The row space of an image's patches, as one update shows it.

    Attributes:
        update: it.
        space: (r, P + 1) orthonormal.
        noise: share of the update's own products outside of it.
    """

    update: PositionRows
    space: Tensor
    noise: float

    @classmethod
    def of(cls, update: PositionRows) -> RowSpace | None:
        """Of one update; None where it could be everything."""
        if update.tokenizer.patch_dim <= update.seen:
            return None
        return cls(update, *_leading(update.products, update.seen))

    @cached_property
    def colourless(self) -> tuple[Tensor, float] | None:
        """The same without mean colours, (r, P) and noise; None where it could be everything."""
        tokenizer = self.update.tokenizer
        if tokenizer.patch_dim - tokenizer.channels <= tokenizer.num_patches:
            return None
        return _leading(without_colours(self.update), tokenizer.num_patches)

    def share_outside(self, update: PositionRows, *, mirrored: bool = False) -> float:
        """Share of an update's products (by norm) that this row space does not hold, its image mirrored or not."""
        s = _mirrored(update.products, update) if mirrored else update.products
        return float((s - (s @ self.space.T) @ self.space).norm() / s.norm())

    def holds(self, update: PositionRows, *, mirrored: bool = False) -> bool:
        """Whether an update shows the same image, mirrored or not."""
        return self.share_outside(update, mirrored=mirrored) < largest_share_of_same_image(self.noise)

    def shares_a_patch(self, other: RowSpace) -> bool:
        """Whether some direction is in both row spaces, of updates that each show some patches of an image only.

        False where any two spaces of their dimensions have one in common.
        """
        if len(self.space) + len(other.space) >= self.space.shape[1]:
            return False
        outside = other.space - (other.space @ self.space.T) @ self.space
        return float(torch.linalg.svdvals(outside)[-1]) < COMMON_DIRECTION

    def best_mix(
        self, update: PositionRows, *, mirrored: bool = False, sketch: Tensor | None = None
    ) -> tuple[float, Tensor] | None:
        """The least share outside over all mixtures of channels, and W (C, C) with it; None where everything fits.

        Args:
            sketch: (K, D), combinations of the products' rows that are looked at; None for all rows.
        """
        if self.colourless is None:
            return None
        space, _ = self.colourless
        s = without_colours(update)
        s = s if sketch is None else sketch.to(s) @ s
        s = mirror(s, update.tokenizer) if mirrored else s
        channels = update.tokenizer.channels
        units = torch.eye(channels**2).to(s).reshape(-1, channels, channels)
        whole = torch.stack([mix_channels(s, unit) for unit in units])  # (C^2, D, P)
        outside = (whole - (whole @ space.T) @ space).flatten(1)
        whole = whole.flatten(1)
        damped = outside @ outside.T
        damped.diagonal().add_(self._bound_mixed() ** 2 * whole.square().sum(dim=1).mean())
        mix = torch.eye(channels).to(s).flatten()
        for _ in range(TURNS):
            mix = torch.linalg.solve(damped, mix)
            mix = mix / mix.norm()
        share = (mix @ outside).norm() / (mix @ whole).norm().clamp(min=1e-300)
        return float(share), mix.reshape(channels, channels)

    def mix_of(self, update: PositionRows, *, mirrored: bool = False) -> Tensor | None:
        """W (C, C) up to a factor where an update shows the same image in other colours; None where it does not."""
        width = update.tokenizer.width
        some = torch.randn(min(SKETCH, width), width, generator=torch.Generator().manual_seed(0))
        for sketch in (some, None):  # most updates of other images are ruled out by some rows
            found = self.best_mix(update, mirrored=mirrored, sketch=sketch)
            if found is None or not found[0] < self._bound_mixed():
                return None
        return found[1] if float(torch.linalg.cond(found[1])) < LARGEST_CONDITION else None

    def _bound_mixed(self) -> float:
        return (max(self.colourless[1], LEAST_SHARE) * OTHER_SHARE_MIXED) ** 0.5


def without_colours(update: PositionRows) -> Tensor:
    """Products of the patches without their mean colours, (D, P)."""
    patches = update.products[:, : update.tokenizer.patch_dim].unflatten(1, (update.tokenizer.channels, -1))
    return (patches - patches.mean(dim=2, keepdim=True)).flatten(1)


def _mirrored(products: Tensor, update: PositionRows) -> Tensor:
    """(D, P + 1) or (D, P): the products of the mirrored patches; the constant pixel stays."""
    p = update.tokenizer.patch_dim
    return torch.cat([mirror(products[:, :p], update.tokenizer), products[:, p:]], dim=1)


def _leading(products: Tensor, rank: int) -> tuple[Tensor, float]:
    """Leading right singular vectors as rows, (rank, c), and the share of the products (D, c) outside of them."""
    values, vectors = torch.linalg.eigh(products.T @ products)  # ascending
    outside = values[:-rank].clamp(min=0).sum() / values.sum()
    return vectors[:, -rank:].T, float(outside.sqrt())
