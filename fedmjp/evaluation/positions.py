"""Accuracy of predicted places (the pretext task of MP3 and DropPos) on unchanged images.

What the encoder is shown is drawn from a fixed seed, so that the same model gives the same number, and two models are
measured on the same draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel

if TYPE_CHECKING:
    from fedmjp.objectives.position_prediction import PositionPrediction

BATCH = 64


@torch.no_grad()
def position_accuracy(
    objective: PositionPrediction, model: BuiltModel, images: ImageSet, device: torch.device, seed: int = 0
) -> tuple[float, float]:
    """Predict the places of patches, in float32; the model is left in evaluation mode.

    Args:
        objective: with the ratios to measure at, which may differ from those of the training
            (`dataclasses.replace`).
        model: with the objective's head, on `device`.
        images: at least one.
        device: where to compute.
        seed: of what the encoder is shown.

    Returns:
        Mean cross-entropy of the true places and top-1 accuracy in [0, 1], over all predicted patches. Chance is 1 / N.
    """
    generator = torch.Generator().manual_seed(seed)
    model.module.eval()
    total, correct, count = 0.0, 0, 0
    for start in range(0, len(images), BATCH):
        pixels = images.images(range(start, min(start + BATCH, len(images)))).to(device)
        logits, places = objective.predict(model, pixels, generator)
        total += float(F.cross_entropy(logits.flatten(0, 1), places.flatten(), reduction="sum"))
        correct += int((logits.argmax(dim=-1) == places).sum())
        count += places.numel()
    return total / count, correct / count
