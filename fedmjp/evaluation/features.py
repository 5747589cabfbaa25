"""Features of a frozen encoder, for k-nearest neighbours and linear probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor

from attacks.registry import UsageError
from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel
from fedmjp.objectives.base import Objective
from fedmjp.objectives.position_prediction import PositionPrediction

BATCH = 64
Pool = Literal["class", "mean"]


def trained_pool(objective: Objective) -> Pool:
    """What an objective trains: the class token, or, where places of patches are predicted, the patches alone."""
    return "mean" if isinstance(objective, PositionPrediction) else "class"


@contextmanager
def recorded_blocks(model: BuiltModel) -> Iterator[list[Tensor]]:
    """Context in which each forward pass adds the output (B, T, D) of every block, in order, to a list."""
    kept: list[Tensor] = []
    with ExitStack() as stack:
        for block in model.module.blocks:
            handle = block.register_forward_hook(lambda _, inputs, output: kept.append(output))
            stack.callback(handle.remove)
        yield kept


@torch.no_grad()
def features(
    model: BuiltModel, images: ImageSet, device: torch.device, pool: Pool = "class", blocks: int = 1
) -> Tensor:
    """Features (n, blocks D) float32 of all images, after the final norm; the model is left in evaluation mode.

    Args:
        model: a plain ViT, on `device`.
        images: n images.
        device: where to compute; the result is on the CPU.
        pool: the class token, or the mean of the patches.
        blocks: outputs of this many last blocks are concatenated, in order, each after the final norm (DINO reads the
            class tokens of four of a ViT-S); all of a model with fewer.

    Raises:
        UsageError: the model is no plain ViT, or has no class token to read.
    """
    module = model.module.eval()
    prefix = getattr(module, "num_prefix_tokens", None)
    if prefix is None:
        raise UsageError(f"features are read from plain ViTs, and {model.name} is none")
    if pool == "class" and not prefix:
        raise UsageError(f"this {model.name} has no class token; read the mean of the patches")
    found = []
    for start in range(0, len(images), BATCH):
        pixels = images.images(range(start, min(start + BATCH, len(images)))).to(device)
        with recorded_blocks(model) as kept:
            module.forward_features(model.normalise(pixels))
        tokens = torch.cat([module.norm(output) for output in kept[-blocks:]], dim=2)  # (B, prefix + N, blocks D)
        found.append((tokens[:, 0] if pool == "class" else tokens[:, prefix:].mean(dim=1)).cpu())
    return torch.cat(found)
