"""Block-wise masks, jigsaws and shuffles of pixels for a whole batch at once (MJP, section 4.2).

Masks follow BEiT's procedure: rectangles of random area and aspect are added until the wanted number of patches is
chosen. All images of a batch draw a rectangle at the same time; there is no loop over images. `block_masks` departs
from BEiT, and from MJP's released code that took it over: exactly round(gamma N) patches are chosen, the last rectangle
trimmed in raster order. `released_masks` is the procedure of the released code (data/masking_generator.py of
github.com/yhlleo/MJP, which the paper does not describe), written anew: at most floor(gamma N) patches, fewer where ten
rectangles in a row do not fit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_BLOCK = 16  # BEiT's smallest rectangle in patches
MIN_ASPECT = 0.3
# Of the released code: areas in patches, on every grid and at every gamma, and tries for a rectangle that fits.
RELEASED_BLOCK = (8, 75)
RELEASED_TRIES = 10


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
    while True:
        remaining = target - mask.sum(dim=(1, 2))  # (B,)
        if not (remaining > 0).any():
            return mask.flatten(1)
        u = torch.rand(4, batch, generator=generator, device=device)
        height, width = _sides(u, remaining.clamp(max=MIN_BLOCK), remaining)
        new = (_rectangles(u, height.clamp(1, rows), width.clamp(1, columns), grid) & ~mask).flatten(1)
        trimmed = new & (new.cumsum(dim=1) <= remaining[:, None])
        mask |= trimmed.view_as(mask)


def scattered_masks(batch: int, grid: tuple[int, int], gamma: float, generator: torch.Generator) -> Tensor:
    """Masks of single patches, every set of round(gamma N) as likely; arguments and shape as for `block_masks`."""
    total = grid[0] * grid[1]
    keys = torch.rand(batch, total, generator=generator, device=generator.device)
    return keys.argsort(dim=1).argsort(dim=1) < count_masked(gamma, total)


def released_masks(batch: int, grid: tuple[int, int], gamma: float, generator: torch.Generator) -> Tensor:
    """Block-wise masks as MJP's released code draws them; `block_masks` describes arguments and shape.

    A rectangle has 8 to min(75, remaining) patches (or down to `remaining` where that is less than 8) and spans neither
    all rows nor all columns. It is taken if it adds between one and `remaining` patches. After ten in a row that are
    not taken the mask stays as it is.

    Returns:
        (B, N) bool with at most floor(gamma N) True a row, in general not the same number in each.
    """
    (rows, columns), device = grid, generator.device
    target = int(gamma * rows * columns)
    mask = torch.zeros(batch, rows, columns, dtype=torch.bool, device=device)
    tries = torch.zeros(batch, dtype=torch.int64, device=device)
    least, most = RELEASED_BLOCK
    while True:
        remaining = target - mask.sum(dim=(1, 2))  # (B,)
        drawing = (remaining > 0) & (tries < RELEASED_TRIES)
        if not drawing.any():
            return mask.flatten(1)
        u = torch.rand(4, batch, generator=generator, device=device)
        height, width = _sides(u, torch.full_like(remaining, least), remaining.clamp(max=most))
        new = _rectangles(u, height, width, grid) & ~mask
        added = new.sum(dim=(1, 2))
        fits = (height < rows) & (width < columns) & (added > 0) & (added <= remaining.clamp(max=most))
        mask |= new & (fits & drawing)[:, None, None]
        tries = torch.where(drawing & fits, 0, tries + 1)


def _sides(u: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Heights and widths (B,) of rectangles of a uniform area and a log-uniform aspect; uses `u[:2]` (4, B)."""
    area = least + u[0] * (most - least)
    aspect = torch.exp((2 * u[1] - 1) * -math.log(MIN_ASPECT))
    return (area * aspect).sqrt().round(), (area / aspect).sqrt().round()


def _rectangles(u: Tensor, height: Tensor, width: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, rows, columns) bool: rectangles anywhere in the grid; uses `u[2:]` (4, B)."""
    rows, columns = grid
    y = torch.arange(rows, device=u.device)[None, :, None]
    x = torch.arange(columns, device=u.device)[None, None, :]
    top = (u[2] * (rows - height + 1)).floor()
    left = (u[3] * (columns - width + 1)).floor()
    y0, x0, h, w = (v[:, None, None] for v in (top, left, height, width))
    return (y >= y0) & (y < y0 + h) & (x >= x0) & (x < x0 + w)


def jigsaw_order(mask: Tensor, generator: torch.Generator) -> Tensor:
    """For each place the patch that goes there: a random permutation of each row's chosen set, identity elsewhere.

    Args:
        mask: (B, N) bool.

    Returns:
        (B, N) int64 on the mask's device.
    """
    counts = mask.sum(dim=1)
    ranks = torch.arange(int(counts.max()), device=mask.device)  # (M,)
    chosen = mask.int().argsort(dim=1, descending=True, stable=True)[:, : len(ranks)]  # (B, M), others behind
    keys = torch.rand(chosen.shape, generator=generator, device=generator.device).to(mask.device)
    keys = torch.where(ranks < counts[:, None], keys, 1 + ranks)  # a place that is not chosen keeps its rank
    order = torch.arange(mask.shape[1], device=mask.device).repeat(len(mask), 1)
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
