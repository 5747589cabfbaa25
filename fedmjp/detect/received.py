"""What a client knows of a round before it trains: the model that it was sent, the one before it, and its own batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.classifier import classifier_of
from attacks.registry import UsageError
from attacks.tokenizer import logits_of
from fedmjp.defenses import ClientInput
from fedmjp.defenses.dp_sgd import norms, per_image_gradients
from fedmjp.defenses.step import LocalStep, local_step

AT_ONCE = 8  # images whose own gradients are held at a time


@dataclass(frozen=True)
class ImageNorms:
    """How much each image of a batch sends, if the client trains.

    Attributes:
        below: (B,) float64, Euclidean norm of each image's own gradient at all trained parameters but the classifier's.
        classifier: (B,) float64, the same at the classifier's; zeros if it is not trained.
        features: (B, D) float64, what reaches the classifier of each image, in which its weight's gradient is linear;
            None where it has no bias or is not trained.
    """

    below: Tensor
    classifier: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class Received:
    """What the statistics read.

    Attributes:
        module: the model, with the weights that the client was sent.
        layer: name of the classifier in it, None where the logits are no linear layer's output.
        previous: all parameters by name that the client was sent before, None in its first round.
        own_norms: computes `images`; None where the client has no batch or no loss of single images at hand.

    Raises:
        UsageError: `previous` holds none of the model's parameters under its name.
    """

    module: nn.Module
    layer: str | None
    previous: Mapping[str, Tensor] | None = None
    own_norms: Callable[[], ImageNorms] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that the last model is of the same names."""
        own = self._shapes
        if self.previous is not None and own and own.keys().isdisjoint(self.previous):
            held = f"they begin with {next(iter(self.previous))}" if self.previous else "there are none"
            raise UsageError(
                f"previous holds no parameter under the model's name ({held}, the model's with {next(iter(own))}); "
                "pass the last model's by the same names, or None in a first round"
            )

    @property
    def classifier(self) -> nn.Linear | None:
        """The classifier."""
        return None if self.layer is None else self.module.get_submodule(self.layer)

    @cached_property
    def images(self) -> ImageNorms | None:
        """How much each image of the client's batch would send; computed once."""
        return None if self.own_norms is None else self.own_norms()

    def before(self, name: str) -> Tensor | None:
        """A parameter as it was sent before, on the model's device; None in the first round, or where it is new."""
        value = (self.previous or {}).get(name)
        return None if value is None else value.to(next(self.module.parameters()).device)

    def is_new(self, name: str) -> bool:
        """Whether there is a last model, and it lacks the model's parameter `name` or has it in another shape."""
        if self.previous is None or name not in self._shapes:
            return False
        return name not in self.previous or self.previous[name].shape != self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        """Of the model's parameters, by name."""
        return {name: value.shape for name, value in self.module.named_parameters()}


def received_by(
    module: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    previous: Mapping[str, Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    at_once: int = AT_ONCE,
) -> Received:
    """What a client of any PyTorch model knows before it trains.

    Args:
        module: with the weights that it was sent, in evaluation mode.
        images: (B, C, H, W), the model's inputs of the first batch, normalised.
        labels: (B,) of them; without labels no gradient is computed, and the statistics that need one make no
            statement.
        previous: all parameters by name that it was sent before; None in its first round.
        loss: mean loss of (logits, labels), a mean over the images.
        at_once: images whose own gradients are held in memory at a time, each as large as the model.

    Raises:
        UsageError: `previous` holds none of the model's parameters under its name.
    """
    layer = classifier_of(module, tuple(images.shape[1:]))
    if labels is None:
        return Received(module, layer, previous)

    def loss_of(views: tuple[ClientInput, ...], labels: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return loss(logits_of(module(views[0].images)), labels)

    step = local_step(_Holder(module), lambda name: False, (ClientInput(images),), labels, loss_of)
    return Received(module, layer, previous, lambda: image_norms(step, layer, at_once))


def image_norms(step: LocalStep, layer: str | None, at_once: int = AT_ONCE) -> ImageNorms:
    """How much each image sends in a step.

    Args:
        step: its loss is a mean of one loss an image.
        layer: name of the classifier.
        at_once: images whose own gradients are held at a time.

    Raises:
        UsageError: model or loss cannot be taken apart by image.
    """
    own, heads, features = [], [], []
    for gradients, _ in per_image_gradients(step, at_once):
        head = {n: g for n, g in gradients.items() if layer is not None and n.startswith(f"{layer}.")}
        below = {n: g for n, g in gradients.items() if n not in head}
        if not below:
            raise UsageError("the client trains nothing but the classifier: no gradient reaches what is below it")
        own.append(norms(below))
        heads.append(norms(head) if head else torch.zeros_like(own[-1]))
        if {f"{layer}.weight", f"{layer}.bias"} <= head.keys():
            features.append(_features(head[f"{layer}.weight"], head[f"{layer}.bias"]))
    return ImageNorms(torch.cat(own), torch.cat(heads), torch.cat(features) if features else None)


def _features(weight: Tensor, bias: Tensor) -> Tensor:
    """h (B, D) float64 of the gradients e h^T (B, K, D) and e (B, K) of a linear layer; zeros where e is."""
    images, rows = torch.arange(len(bias)), bias.abs().argmax(dim=1)
    error = bias[images, rows].double()[:, None]
    return torch.where(error != 0, weight[images, rows].double() / error, 0.0)


@dataclass(frozen=True)
class _Holder:
    """A module as `LocalStep` asks for one."""

    module: nn.Module
