"""Accuracy of a model on unchanged images: no defence, no augmentation."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel

BATCH, ACCELERATED_BATCH = 32, 512  # images at a time on a CPU, and on an accelerator


@torch.no_grad()
def evaluate(model: BuiltModel, images: ImageSet, device: torch.device) -> tuple[float, float]:
    """Evaluate the model in float32; it is left in evaluation mode.

    Args:
        model: the model, on `device`.
        images: labelled test images, at least one.
        device: where to compute.

    Returns:
        Mean cross-entropy, and accuracy in [0, 1].
    """
    module, total, correct = model.module.eval(), 0.0, 0
    batch = BATCH if device.type == "cpu" else ACCELERATED_BATCH
    for start in range(0, len(images), batch):
        indices = range(start, min(start + batch, len(images)))
        labels = images.labels[start : start + batch].to(device)
        logits = module(model.normalise(images.images(indices).to(device)))
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        correct += int((logits.argmax(dim=1) == labels).sum())
    return total / len(images), correct / len(images)
