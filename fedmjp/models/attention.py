"""The attention weights of a ViT's blocks, as computed in its forward pass.

timm's fused attention does not return the weights. Therefore a block is switched to the unfused computation for one
pass, and a hook records the output of its softmax, which includes any norm, scale or bias of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from attacks.registry import UsageError
from fedmjp.models.build import BuiltModel


@contextmanager
def recorded_attention(block: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which each forward pass of a plain ViT adds the attention weights of one of its blocks to a list.

    Yields:
        The list, of tensors (B, heads, T, T); each row (one query token) sums to 1. Tokens are in the model's order:
        prefix tokens, [CLS] first, then patches in raster order.
    """
    layer, kept = block.attn, []
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
    with recorded_attention(module.blocks[-1]) as kept:
        module.eval()(model.normalise(images))
    return kept[0]


@torch.no_grad()
def every_attention(model: BuiltModel, images: Tensor) -> Tensor:
    """Attention weights (layers, B, heads, T, T) of all blocks, see `recorded_attention`.

    The model is left in evaluation mode.

    Args:
        model: a plain ViT, with or without a [CLS] token.
        images: (B, C, H, W) in [0, 1].

    Raises:
        UsageError: the model is no plain ViT.
    """
    blocks = getattr(model.module, "blocks", None)
    if blocks is None:
        raise UsageError(f"{model.name} is no plain ViT, whose attention is needed")
    with ExitStack() as stack:
        kept = [stack.enter_context(recorded_attention(block)) for block in blocks]
        model.module.eval().forward_features(model.normalise(images))
    return torch.stack([found for (found,) in kept])


def class_attention(attention: Tensor, prefix: int) -> Tensor:
    """Attention (B, N) of the class token to the patches, mean over heads.

    Args:
        attention: (B, heads, T, T) of one block, rows are queries.
        prefix: number of tokens before the patches, the class token first.
    """
    return attention[:, :, 0, prefix:].mean(dim=1)


def candidates(attention: Tensor, count: int, most: bool) -> Tensor:
    """The `count` least (or most) attended patches of each image; of equal ones the first in raster order.

    Args:
        attention: (B, N).

    Returns:
        (B, N) bool with `count` True a row.
    """
    order = attention.argsort(dim=1, descending=most, stable=True)
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(1, order[:, :count], True)
