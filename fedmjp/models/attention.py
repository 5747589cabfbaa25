"""The attention weights of a ViT's last block, as computed in its forward pass.

timm's fused attention does not return the weights. Therefore the block is switched to the unfused computation for one
pass, and a hook records the output of its softmax, which includes any norm, scale or bias of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attacks.registry import UsageError
from fedmjp.models.build import BuiltModel


@contextmanager
def recorded_attention(module: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which each forward pass of a plain ViT adds its last block's attention weights to a list.

    Yields:
        The list, of tensors (B, heads, T, T); each row (one query token) sums to 1. Tokens are in the model's order:
        prefix tokens, [CLS] first, then patches in raster order.
    """
    layer, kept = module.blocks[-1].attn, []
    hook = layer.attn_drop.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    fused, layer.fused_attn = layer.fused_attn, False
    try:
        yield kept
    finally:
        hook.remove()
        layer.fused_attn = fused


@torch.no_grad()
def last_attention(model: BuiltModel, images: Tensor) -> Tensor:
    """Attention weights (B, heads, T, T) of the last block, see `recorded_attention`.

    The model is left in evaluation mode.

    Args:
        model: a plain ViT.
        images: (B, C, H, W) in [0, 1].

    Raises:
        UsageError: the model is not a plain ViT with a [CLS] token.
    """
    module = model.module
    if getattr(module, "cls_token", None) is None or not hasattr(module, "blocks"):
        raise UsageError(f"{model.name} has no [CLS] token, whose attention is needed; name a ViT")
    with recorded_attention(module) as kept:
        module.eval()(model.normalise(images))
    return kept[0]
