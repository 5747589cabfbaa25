"""What a client minimises: the heads it needs, its view of a batch, its loss, and what it keeps to itself.

An objective is one file: a frozen dataclass whose fields are its options, and the hooks it needs. A line in
`fedmjp.objectives.OBJECTIVES`, or an entry point of another package, makes it known by name. Objectives are stateless.
What they train beside the encoder (`attach`) is a part of the model and therefore sent with every update; what they
remember from step to step and do not train, such as a teacher (`local`), is a module of its own and is not in the
update. Their randomness comes from a generator that is passed to them. Command lines import every objective for its
options: a module that imports torch inside its hooks keeps `--help` fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.data import DataBundle
    from fedmjp.defenses import ClientInput, Defense
    from fedmjp.models import BuiltModel


@dataclass(frozen=True)
class TrainingBatch:
    """What a loss is a function of, beside the model.

    Attributes:
        views: what `Objective.views` made of the images, each after the defence on the input; mostly one.
        labels: (B,) int64, or (B, classes) probabilities (smoothed or mixed labels), or None; of an objective
            `per_pixel` (B, H, W) int64, as they were before the defence.
        generator: a CPU generator for the objective's own random numbers, the same for the same step.
        progress: share of the training that is done, in [0, 1).
    """

    views: tuple[ClientInput, ...]
    labels: Tensor | None
    generator: torch.Generator
    progress: float = 0.0


@dataclass(frozen=True)
class Objective:
    """Base class; an objective overrides `loss` and `evaluate`, and of the rest what it needs.

    Attributes:
        needs_labels: whether the loss reads labels. Mixing and smoothing of labels are for such objectives only.
        per_pixel: whether labels are maps, a class for each pixel; such an objective is trained centrally.
        per_image: whether the loss is the mean over images of a loss of each image alone, without random numbers.
        drops_patches: whether the encoder sees a part of the patches only.
        score: name of what `evaluate` measures, for a table.
        accuracy_of: what the accuracy of `evaluate` counts, in words for a table.
        recipe: how the paper trains, where that differs from `fedmjp.training.config`: field of `Recipe` or
            `StartConfig` -> value. They become the defaults of `fedmjp.train --objective NAME`.
    """

    needs_labels: ClassVar[bool] = False
    per_pixel: ClassVar[bool] = False
    per_image: ClassVar[bool] = False
    drops_patches: ClassVar[bool] = False
    score: ClassVar[str] = "accuracy"
    accuracy_of: ClassVar[str] = "images"
    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @property
    def kept_by(self) -> Literal["client", "server"]:
        """Who keeps in a federation what `local` makes.

        With "server" there is one for all clients: the server makes it from its first weights, sends it with every
        round's weights, and updates it (`after_step`) after every round; clients only read it.
        """
        return "client"

    @property
    def whole_views(self) -> int:
        """Views of an image of the image's own size in a step; they come first in `views`."""
        return 1

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""

    def model_name(self, name: str) -> str:
        """The variant of model `name` that this objective trains; the defence chooses its variant of that one."""
        return name

    def check(self, model: str, defense: Defense) -> None:
        """Refuse what does not go together; called before anything is loaded.

        Args:
            model: name of the model as the user gave it.
            defense: the client's defence.

        Raises:
            UsageError: the objective cannot train the model, or has no use for the defence.
        """

    def attach(self, module: nn.Module) -> None:
        """Add heads to a new model, before weights are loaded; torch's seed is set to the run's.

        Heads are registered as `module.pretext`: names that begin with "pretext." are dropped when the encoder is
        fine-tuned. A classifier that the loss does not use is removed (`module.reset_classifier(0)`), so that no
        parameter without gradient is sent.
        """

    def begin_fine_tuning(self, module: nn.Module) -> None:
        """Change a model whose encoder this objective has pre-trained, after its weights are loaded for fine-tuning."""

    def local(self, model: BuiltModel) -> nn.Module | None:
        """What a client keeps to itself between steps and does not send, such as a teacher; None for nothing."""
        return None

    def views(self, images: Tensor, model: BuiltModel, generator: torch.Generator) -> tuple[Tensor, ...]:
        """What is made of a batch (B, C, H, W) in [0, 1] before the defence acts on each part of it."""
        return (images,)

    def loss(self, model: BuiltModel, batch: TrainingBatch, local: nn.Module | None) -> Tensor:
        """The mean loss over the batch, a scalar.

        Args:
            model: with the heads of `attach`.
            batch: the views after the defence, labels, random numbers.
            local: what `local` returned.
        """
        raise NotImplementedError

    def after_step(self, model: BuiltModel, local: nn.Module | None, progress: float) -> None:
        """Update what the client keeps to itself, after each of its steps; `progress` is as in `TrainingBatch`."""

    def evaluate(
        self, model: BuiltModel, local: nn.Module | None, data: DataBundle, device: torch.device
    ) -> tuple[float, float]:
        """Evaluate on the test images without a defence; the same call gives the same numbers.

        Returns:
            Mean loss, and the accuracy that `accuracy_of` names, in [0, 1].
        """
        raise NotImplementedError
