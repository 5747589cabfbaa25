"""What a client and central training do alike in a step: the objective's view of the batch, the defence on the input,
the loss with the defence's terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attacks.registry import UsageError
from fedmjp.config import ModelConfig
from fedmjp.defenses import ClientInput, Defense
from fedmjp.defenses.step import LocalStep, local_step
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.build import adapt_seeded, load_at_size
from fedmjp.models.encoder import load_encoder, renew_heads
from fedmjp.models.weights import Origin, classes_of, read_origin, read_state
from fedmjp.objectives import read_objective
from fedmjp.objectives.base import Objective, TrainingBatch
from fedmjp.objectives.supervised import Supervised
from fedmjp.objectives.terms import TERMS


@dataclass(frozen=True)
class Draws:
    """The random numbers of a step: one CPU generator for the defence, another for the objective."""

    defense: torch.Generator
    objective: torch.Generator

    @classmethod
    def seeded(cls, defense: int, objective: int) -> Draws:
        """New generators with these seeds."""
        return cls(*(torch.Generator().manual_seed(seed) for seed in (defense, objective)))


class Learner:
    """A model under an objective and a defence.

    Args:
        objective: what is minimised.
        defense: acts on each view of the batch, and adds its terms to the loss.
        model: as `build_model` made it, with the objective's heads attached.

    Attributes:
        local: what the objective keeps and does not send, or None.
    """

    def __init__(self, objective: Objective, defense: Defense, model: BuiltModel) -> None:
        self.objective, self.defense, self.model = objective, defense, model
        self.local = objective.local(model)

    @classmethod
    def build(
        cls,
        objective: Objective,
        defense: Defense,
        model: ModelConfig,
        *,
        num_classes: int,
        seed: int,
        device: torch.device,
        encoder: Path | None = None,
    ) -> Learner:
        """Build the model that objective and defence ask for, on `device`.

        Args:
            encoder: a checkpoint whose encoder is fine-tuned (`load_encoder`); all else is new, and the model's own
                weights are not loaded.

        Raises:
            UsageError: they do not go together, or weights are missing or unfit.
        """
        objective.check(model.model, defense)
        build = partial(
            build_model,
            trained_name(objective, defense, model.model),
            num_classes=num_classes,
            weights=model.weights if encoder is None else "random",
            block=model.block,
            dal=getattr(defense, "dal", "none"),
            attach=objective.attach,
            adapt=defense.adapt if encoder is None else None,
            image_size=model.image_size if encoder is None else None,
        )
        built = build(seed=seed)
        if encoder is not None:
            load, origin = partial(load_encoder, built.module, encoder), read_origin(encoder)
            built = load_at_size(built, model.image_size, encoder, load)
            renew_heads(built.module, encoder, lambda other: build(seed=other).module, seed)
            if origin:
                read_objective(origin.objective).begin_fine_tuning(built.module)
            adapt_seeded(built.module, defense.adapt, seed)
        built.module.to(device)
        return cls(objective, defense, built)

    def begin(self, kept: Mapping[str, Tensor] | None = None) -> None:
        """Make what the objective keeps from the model's weights as they are now, or take it up from `kept`."""
        self.local = self.objective.local(self.model)
        if self.local is not None and kept:
            self.local.load_state_dict(dict(kept))

    def kept(self) -> dict[str, Tensor]:
        """A copy of what the objective keeps, by name; empty if it keeps nothing."""
        return {} if self.local is None else {n: t.clone() for n, t in self.local.state_dict().items()}

    def views(self, images: Tensor, draws: Draws, round: int) -> tuple[ClientInput, ...]:
        """The views of a batch (B, C, H, W) in [0, 1] as the model sees them; `round` counts from 1."""
        views = self.objective.views(images, self.model, draws.objective)
        return tuple(self.defense.on_input(view, self.model, draws.defense, round) for view in views)

    def loss(
        self, views: tuple[ClientInput, ...], labels: Tensor | None, draws: Draws, progress: float = 0.0
    ) -> Tensor:
        """The objective's loss plus the defence's weighted terms, a scalar.

        Args:
            views: from `views`, with the same `draws`.
            labels: see `TrainingBatch`.
            draws: the objective's generator goes on where `views` left it.
            progress: see `TrainingBatch`.
        """
        batch = TrainingBatch(views, labels, draws.objective, progress)
        loss = self.objective.loss(self.model, batch, self.local)
        return _add_terms(loss, self.model, views[0].position_mask, self.defense.loss_weights())

    def step(
        self,
        views: tuple[ClientInput, ...],
        labels: Tensor | None,
        draws: Draws,
        progress: float = 0.0,
        context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> LocalStep:
        """What the defence computes the gradient of a step from.

        Args:
            views, labels, draws, progress: see `loss`.
            context: makes the context in which a loss is computed, such as autocast.
        """

        def loss_of(views: tuple[ClientInput, ...], labels: Tensor | None) -> Tensor:
            """The loss of these images."""
            with context():
                return self.loss(views, labels, draws, progress)

        return local_step(self.model, self.defense.freezes, views, labels, loss_of)

    def after_step(self, progress: float) -> None:
        """Update what the objective keeps; called after each change of the weights."""
        self.objective.after_step(self.model, self.local, progress)


def require_origin(checkpoint: Path) -> Origin:
    """How a checkpoint was trained.

    Raises:
        UsageError: the file cannot be read, or does not say.
    """
    read_state(checkpoint)
    origin = read_origin(checkpoint)
    if origin is None:
        raise UsageError(f"{checkpoint} does not say how it was trained; pass a model.safetensors of fedmjp.train")
    return origin


def restore(checkpoint: Path, device: torch.device) -> Learner:
    """The model in a model.safetensors of `fedmjp.train`, with its objective and its heads, on `device`.

    Raises:
        UsageError: a file that does not say how it was trained, or that does not fit.
    """
    origin = require_origin(checkpoint)
    return Learner.build(
        read_objective(origin.objective),
        Defense(),
        ModelConfig(origin.model, str(checkpoint)),
        num_classes=classes_of(origin.model, str(checkpoint)) or 0,
        seed=0,
        device=device,
    )


def trained_name(objective: Objective, defense: Defense, name: str) -> str:
    """The variant of model `name` that is trained."""
    return defense.model_name(objective.model_name(name))


def client_loss(
    model: BuiltModel,
    images: Tensor,
    labels: Tensor,
    position_mask: Tensor | None,
    weights: Mapping[str, float],
    origins: Tensor | None = None,
) -> Tensor:
    """The loss of a supervised client whose defence has acted on the input already, a scalar.

    Args:
        model: the model.
        images: (B, C, H, W) in [0, 1], after the defence.
        labels: (B,) int64, or (B, classes) probabilities (smoothed or mixed labels).
        position_mask: (B, N) bool or None.
        weights: term name -> weight (`Defense.loss_weights`).
        origins: (B, N) int64, for models that embed the original place of each patch (IDX), or None.

    Raises:
        UsageError: a name in `weights` is not registered.
    """
    batch = TrainingBatch((ClientInput(images, position_mask, origins),), labels, torch.Generator())
    return _add_terms(Supervised().loss(model, batch, None), model, position_mask, weights)


def _add_terms(loss: Tensor, model: BuiltModel, position_mask: Tensor | None, weights: Mapping[str, float]) -> Tensor:
    for name, weight in weights.items():
        loss = loss + weight * TERMS.get(name)(model, position_mask)
    return loss
