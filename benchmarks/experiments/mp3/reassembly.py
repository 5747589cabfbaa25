"""Images put together from predicted places (Figures 2, 12, 13), and two images mixed (Figures 14, 15)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmjp.models import BuiltModel
from fedmjp.objectives.mp3 import MP3

EMPTY = 0.5  # grey of places at which no patch is put


def to_patches(images: Tensor, size: int) -> Tensor:
    """Images (B, C, H, W) as patches (B, N, C, size, size) in raster order."""
    return images.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def to_images(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Inverse of `to_patches`.

    Args:
        grid: (rows, columns), with as many places as there are patches.
    """
    tiles = patches.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)  # (B, C, rows, size, columns, size)
    return tiles.flatten(4, 5).flatten(2, 3)


def reassemble(patches: Tensor, places: Tensor) -> Tensor:
    """Put each patch at its place; patches at the same place are averaged, and a place without one is grey.

    Args:
        patches: (B, N, C, p, p).
        places: (B, N) int64 in 0..N-1.

    Returns:
        (B, N, C, p, p), place by place.
    """
    total = patches.shape[1]
    chosen = torch.nn.functional.one_hot(places, total).to(patches)  # (B, N, N): patch, place
    counts = chosen.sum(dim=1)[..., None]  # (B, N, 1)
    sums = chosen.mT @ patches.flatten(2)
    return torch.where(counts > 0, sums / counts.clamp(min=1), EMPTY).view(patches.shape)


@torch.no_grad()
def predicted_places(model: BuiltModel, eta: float, images: Tensor, generator: torch.Generator) -> Tensor:
    """The most likely place of each patch, (B, N), at a masking ratio that may differ from the training's.

    Args:
        model: pre-trained with MP3.
        images: (B, C, H, W) in [0, 1]. The order of their patches says nothing to the model.
        generator: draws the context.
    """
    model.module.eval()
    return MP3(eta=eta).predict(model, images, generator)[0].argmax(dim=-1)


def reassembled(model: BuiltModel, eta: float, images: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B, C, H, W) with their patches at the places that the model predicts."""
    places = predicted_places(model, eta, images, generator)
    return to_images(reassemble(to_patches(images, model.patch_size), places), model.grid)


def shuffled_together(pair: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The patches of two images (2, C, H, W) shuffled and divided into two sets of as many: (2, N, C, size, size)."""
    patches = to_patches(pair, size)
    order = torch.randperm(patches.shape[0] * patches.shape[1], generator=generator)
    return patches.flatten(0, 1)[order].unflatten(0, patches.shape[:2])


def mixed(model: BuiltModel, eta: float, pair: Tensor, generator: torch.Generator) -> Tensor:
    """The two sets of `shuffled_together`, each put together as the model predicts, (2, C, H, W)."""
    sets = to_images(shuffled_together(pair, model.patch_size, generator), model.grid)
    return reassembled(model, eta, sets, generator)
