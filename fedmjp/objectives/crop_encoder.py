"""Tokens of a ViT for a crop of any size, some of whose patches are replaced.

The position embedding of a crop that is smaller than the model's image is the model's own, resampled to the crop's grid
(DINO; bicubic with antialiasing, by timm).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

Replace = Callable[[Tensor], Tensor]


def grid_of(module: nn.Module, images: Tensor) -> tuple[int, int]:
    """(rows, columns) of patches in images (B, C, H, W) whose sides are whole numbers of patches."""
    patch = module.patch_embed.patch_size
    return images.shape[2] // patch[0], images.shape[3] // patch[1]


def encode_crops(
    module: nn.Module, images: Tensor, position_mask: Tensor | None = None, replace: Replace | None = None
) -> Tensor:
    """Tokens (B, 1 + N, D) after the final norm, the class token first.

    Args:
        module: a `ViT` with a class token, with learned positions or none.
        images: (B, C, H, W), normalised.
        position_mask: (B, N) bool, positions hidden behind the unknown embedding (MJP), or None; for crops of the
            model's image size.
        replace: changes the projected patches (B, N, D) before their positions are added.
    """
    patches = module.patch_embed.norm(module.patch_embed.proj(images).flatten(2).transpose(1, 2))  # (B, N, D)
    if replace is not None:
        patches = replace(patches)
    first = module.cls_token
    if module.pos_embed is not None:
        grid, own = grid_of(module, images), module.patch_embed.grid_size
        table = module.pos_embed if grid == own else resample_abs_pos_embed(module.pos_embed, grid, own, 1)
        prefix, positions = table.split([1, patches.shape[1]], dim=1)
        if position_mask is not None:
            positions = torch.where(position_mask[..., None], module.unk_embed, positions)
        first, patches = first + prefix, patches + positions
    return module.encode(module.pos_drop(torch.cat([first.expand(len(patches), -1, -1), patches], dim=1)))
