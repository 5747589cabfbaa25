"""What the tables of pre-trainings by an objective have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attacks.registry import UsageError
from experiments.scaffold import RowOptions
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.training.config import Recipe, TrainConfig


@dataclass(frozen=True)
class PretrainingOptions(RowOptions):
    """What is trained on what, and how; the same for all pre-trainings of a table."""

    model: str = "vit_micro_32"
    """A plain ViT."""
    data: DataConfig = field(default_factory=lambda: DataConfig("cifar10", None, None, 2_000))
    """What is trained on; the same images for all pre-trainings of a seed."""
    recipe: Recipe = field(default_factory=Recipe)
    """How to train, all alike. The defaults are a short training."""
    seeds: tuple[int, ...] = (0,)
    """Each fixes weights, order, crops, masks, and the subsets of images, for all pre-trainings alike."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations in training; measures are taken in float32."""

    def training(self, objective: str, seed: int) -> TrainConfig:
        """The options of one training, as `python -m fedmjp.train` takes them.

        Args:
            objective: as --objective takes it.
        """
        return TrainConfig(
            objective=objective,
            model=ModelConfig(self.model, "random"),
            data=self.data,
            recipe=self.recipe,
            precision=self.precision,
            device=self.device,
            threads=self.threads,
            seed=seed,
        )

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        super().validate()
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("--seeds takes different numbers, at least one")
