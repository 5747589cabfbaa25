"""Supervised classification: the mean cross-entropy of the labels, on the class token or the mean of the patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.models.registry import MODELS, split_name
from fedmjp.objectives.base import Objective, TrainingBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.defenses import Defense
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class Supervised(Objective):
    """Options of --objective supervised."""

    needs_labels: ClassVar[bool] = True
    per_image: ClassVar[bool] = True

    pool: Literal["class", "mean"] = "class"
    """What a plain ViT's classifier reads: the class token, or the mean of the patches (DropPos fine-tunes so)."""

    def check(self, model: str, defense: Defense) -> None:
        """Refuse pooling for models that have no class token to leave out.

        Raises:
            UsageError: see `Objective.check`.
        """
        if self.pool == "mean" and MODELS.get(split_name(model)[0]).vit is None:
            raise UsageError(f"--objective supervised:pool=mean is for plain ViTs; {model} pools by itself")

    def attach(self, module: nn.Module) -> None:
        """Let the classifier read the mean of the patches, if so asked; its weights stay as they are."""
        if self.pool == "mean":
            module.global_pool = "avg"

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
