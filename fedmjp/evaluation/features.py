"""Features of a frozen encoder, for k-nearest neighbours and linear probes."""

from __future__ import annotations

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


@torch.no_grad()
def features(model: BuiltModel, images: ImageSet, device: torch.device, pool: Pool = "class") -> Tensor:
    """Features (n, D) float32 of all images, after the final norm; the model is left in evaluation mode.

    Args:
        model: a plain ViT, on `device`.
        images: n images.
        device: where to compute; the result is on the CPU.
        pool: the class token, or the mean of the patches.

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
        tokens = module.forward_features(model.normalise(pixels))  # (B, prefix + N, D)
        found.append((tokens[:, 0] if pool == "class" else tokens[:, prefix:].mean(dim=1)).cpu())
    return torch.cat(found)
