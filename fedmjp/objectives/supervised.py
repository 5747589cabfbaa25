"""Supervised classification: the mean cross-entropy of the labels, on the class token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.objectives.base import Objective, TrainingBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class Supervised(Objective):
    """Cross-entropy; it has no options."""

    needs_labels: ClassVar[bool] = True

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """Mean cross-entropy.

        Raises:
            UsageError: the batch has no labels.
        """
        from torch.nn import functional as F

        if batch.labels is None:
            raise UsageError("the objective supervised needs labels, and the images have none; use another --objective")
        (seen,) = batch.views
        logits = model.module(model.normalise(seen.images), **seen.forward_kwargs())
        return F.cross_entropy(logits, batch.labels)

    def evaluate(
        self, model: BuiltModel, local: nn.Module | None, data: DataBundle, device: torch.device
    ) -> tuple[float, float]:
        """Cross-entropy and top-1 accuracy on the test images."""
        from fedmjp.evaluation.accuracy import evaluate

        return evaluate(model, data.test, device)
