"""Block-wise masks, jigsaws and shuffles of pixels for a whole batch at once (MJP, section 4.2).

Masks follow BEiT's procedure: rectangles of random area and aspect are added until the wanted number of patches is
chosen. All images of a batch draw a rectangle at the same time; there is no loop over images. Departs from BEiT, and
from MJP's released code that took it over: exactly round(gamma N) patches are chosen (theirs stops at the first
rectangle that does not fit, and floors); the last rectangle is trimmed in raster order instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_BLOCK = 16  # BEiT's smallest rectangle in patches; MJP's released code passes 8
MIN_ASPECT = 0.3


def count_masked(gamma: float, num_patches: int) -> int:
    """round(gamma N), halves up."""
    return math.floor(gamma * num_patches + 0.5)


def block_masks(batch: int, grid: tuple[int, int], gamma: float, generator: torch.Generator) -> Tensor:
    """Random block-wise masks.

    Args:
        grid: patches (rows, columns).
        gamma: share of patches to choose, in [0, 1].
        generator: its device is the result's.

    Returns:
        (B, N) bool with exactly round(gamma N) True a row.
    """
    rows, columns = grid
    device = generator.device
    target = count_masked(gamma, rows * columns)
    if target in (0, rows * columns):
        return torch.full((batch, rows * columns), target > 0, device=device)
    mask = torch.zeros(batch, rows, columns, dtype=torch.bool, device=device)
    y = torch.arange(rows, device=device)[None, :, None]
    x = torch.arange(columns, device=device)[None, None, :]
    while True:
        remaining = target - mask.sum(dim=(1, 2))  # (B,)
        if not (remaining > 0).any():
            return mask.flatten(1)
        u = torch.rand(4, batch, generator=generator, device=device)
        least = remaining.clamp(max=MIN_BLOCK)
        area = least + u[0] * (remaining - least)
        aspect = torch.exp((2 * u[1] - 1) * -math.log(MIN_ASPECT))
        height = (area * aspect).sqrt().round().clamp(1, rows)
        width = (area / aspect).sqrt().round().clamp(1, columns)
        top = (u[2] * (rows - height + 1)).floor()
        left = (u[3] * (columns - width + 1)).floor()
        y0, x0, h, w = (v[:, None, None] for v in (top, left, height, width))
        block = (y >= y0) & (y < y0 + h) & (x >= x0) & (x < x0 + w)
        new = (block & ~mask).flatten(1)
        trimmed = new & (new.cumsum(dim=1) <= remaining[:, None])
        mask |= trimmed.view_as(mask)


def jigsaw_order(mask: Tensor, generator: torch.Generator) -> Tensor:
    """For each place the patch that goes there: a random permutation of each row's chosen set, identity elsewhere.

    Args:
        mask: (B, N) bool with the same number of True in each row.

    Returns:
        (B, N) int64 on the mask's device.
    """
    batch, places = mask.shape
    chosen = mask.nonzero()[:, 1].view(batch, -1)  # (B, M)
    keys = torch.rand(chosen.shape, generator=generator, device=generator.device).to(mask.device)
    order = torch.arange(places, device=mask.device).repeat(batch, 1)
    return order.scatter_(1, chosen, chosen.gather(1, keys.argsort(dim=1)))


def move_patches(images: Tensor, order: Tensor, patch_size: int) -> Tensor:
    """Put patch `order[b, i]` of each image at place i.

    Args:
        images: (B, C, H, W); H and W are multiples of `patch_size`.
        order: (B, N) int64.
    """
    patches = F.unfold(images, patch_size, stride=patch_size)  # (B, P, N)
    moved = patches.gather(2, order[:, None, :].expand_as(patches))
    return F.fold(moved, images.shape[-2:], patch_size, stride=patch_size)


def move_pixels(images: Tensor, order: Tensor, patch_size: int) -> Tensor:
    """Put pixel `order[b, i]` of each patch at the patch's pixel i, counted row by row.

    Args:
        images: (B, C, H, W); H and W are multiples of `patch_size`.
        order: (B, p^2) int64.
    """
    channels = images.shape[1]
    patches = F.unfold(images, patch_size, stride=patch_size).unflatten(1, (channels, -1))  # (B, C, p^2, N)
    moved = patches.gather(2, order[:, None, :, None].expand_as(patches)).flatten(1, 2)
    return F.fold(moved, images.shape[-2:], patch_size, stride=patch_size)
