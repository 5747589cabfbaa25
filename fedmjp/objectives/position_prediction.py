"""The base of objectives that predict where patches stand: loss, evaluation, and the checks of models."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.models.registry import MODELS, split_name
from fedmjp.objectives.base import Objective, TrainingBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class PositionPrediction(Objective):
    """Cross-entropy of predicted places; a subclass draws what the encoder sees and predicts."""

    accuracy_of: ClassVar[str] = "places of patches"

    @abstractmethod
    def predict(self, model: BuiltModel, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Predict the places of M patches of each image (B, C, H, W) in [0, 1].

        Returns:
            Logits (B, M, N), and the true places (B, M) int64.
        """

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """Mean cross-entropy over the predicted patches of all images."""
        from torch.nn import functional as F

        (seen,) = batch.views
        logits, places = self.predict(model, seen.images, batch.generator)
        return F.cross_entropy(logits.flatten(0, 1), places.flatten())

    def evaluate(
        self, model: BuiltModel, local: nn.Module | None, data: DataBundle, device: torch.device
    ) -> tuple[float, float]:
        """Cross-entropy of the true places, without smoothing or weights, and top-1 accuracy, at the training's ratios.

        See `position_accuracy`.
        """
        from fedmjp.evaluation.positions import position_accuracy

        return position_accuracy(self, model, data.test, device)


def require_grid(objective: str, name: str, variants: tuple[str, ...]) -> tuple[str, int]:
    """The model's name without its variant, and its number of patches N.

    Args:
        objective: for the message.
        name: of the model.
        variants: those that the objective takes.

    Raises:
        UsageError: the model is no plain ViT, or another variant.
    """
    base, variant = split_name(name)
    spec = MODELS.get(base)
    if spec.vit is None:
        plain = ", ".join(n for n in MODELS if MODELS.get(n).vit is not None)
        raise UsageError(f"--objective {objective} needs a plain ViT, not {name}; choose from: {plain}")
    if variant not in variants:
        raise UsageError(f"--objective {objective} chooses its own variant; pass --model {base}, not {name}")
    return base, (spec.image_size // spec.patch_size) ** 2
