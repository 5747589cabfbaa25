"""Segmentation of unchanged test images: cross-entropy, mean IoU and mean accuracy over classes, by torchmetrics.

Intersections and unions are counted over the whole test set and divided class by class, as in ADE20K's protocol and
unlike torchmetrics' `MeanIoU`, which averages over images. Ignored pixels do not count; a class that occurs neither in
the labels nor in the predictions is left out of the means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from fedmjp.data.labelmaps import IGNORED, LabelMapSet
from fedmjp.models import BuiltModel
from fedmjp.models.upernet import pixel_logits

BATCH = 32


@dataclass(frozen=True)
class SegmentationScores:
    """Scores of one model.

    Attributes:
        loss: mean cross-entropy of a pixel.
        miou: mean over classes of intersection over union, in [0, 1].
        macc: mean over classes of the share of its pixels that are found, in [0, 1].
        iou: (classes,) intersection over union of each class.
    """

    loss: float
    miou: float
    macc: float
    iou: tuple[float, ...]


@torch.no_grad()
def segmentation_scores(model: BuiltModel, images: LabelMapSet, device: torch.device) -> SegmentationScores:
    """Evaluate the model in float32; it is left in evaluation mode.

    Args:
        model: with a `UPerNetHead`, on `device`.
        images: test images with label maps, at least one.
        device: where to compute.
    """
    module, total, count = model.module.eval(), 0.0, 0
    scores = Confusion(len(images.classes), device)
    for start in range(0, len(images), BATCH):
        indices = range(start, min(start + BATCH, len(images)))
        labels = images.targets(indices).to(device)
        logits = pixel_logits(module, model.normalise(images.images(indices).to(device)))
        counted = int((labels != IGNORED).sum())
        total += float(pixel_loss(logits, labels)) * counted
        count += counted
        scores.add(logits.argmax(dim=1), labels)
    return scores.result(total / max(count, 1))


class Confusion:
    """Counts of predicted against true classes, of pixels.

    Args:
        classes: their number.
        device: of the maps.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        shared = {"num_classes": classes, "ignore_index": IGNORED, "validate_args": False}
        self.miou = MulticlassJaccardIndex(**shared, average="macro").to(device)
        self.iou = MulticlassJaccardIndex(**shared, average="none").to(device)
        self.macc = MulticlassAccuracy(**shared, average="macro").to(device)

    def add(self, found: Tensor, labels: Tensor) -> None:
        """Count predicted and true classes, both (B, H, W) int64."""
        for metric in (self.miou, self.iou, self.macc):
            metric.update(found, labels)

    def result(self, loss: float) -> SegmentationScores:
        """The scores of all that was counted."""
        per_class = tuple(float(value) for value in self.iou.compute())
        return SegmentationScores(loss, float(self.miou.compute()), float(self.macc.compute()), per_class)


def pixel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the pixels that are not ignored, a scalar; 0 if all are.

    Args:
        logits: (B, classes, H, W).
        labels: (B, H, W) int64.
    """
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
