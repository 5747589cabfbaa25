"""One local step of a client as a defence sees it: the model, what it is shown, and the loss.

torch is imported where a gradient is computed, so that command lines can import every defence without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.defenses.base import ClientInput
    from fedmjp.models import BuiltModel


@dataclass(eq=False)
class LocalStep:
    """What `Defense.gradients` computes the gradient of a step from.

    Attributes:
        model: the client's model, with its present weights.
        views: the batch as the model sees it, after the defence on the input; mostly one view.
        labels: (B,) int64, or (B, classes) probabilities, or None where the objective needs none.
        loss_of: (views, labels) -> the mean loss over the images of a batch with the defence's terms, a scalar.
        trained: the parameters that the client trains, by name (all but `Defense.freezes`).
        frozen: the others.
        names: of all parameters, in the model's order.
        unused: after `gradients`, names of trained parameters that the loss does not depend on.
    """

    model: BuiltModel
    views: tuple[ClientInput, ...]
    labels: Tensor | None
    loss_of: Callable[[tuple[ClientInput, ...], Tensor | None], Tensor]
    trained: Mapping[str, Tensor]
    frozen: Mapping[str, Tensor]
    names: tuple[str, ...]
    unused: set[str] = field(default_factory=set, init=False)

    @cached_property
    def loss(self) -> Tensor:
        """The mean loss of the step, a scalar; computed once."""
        return self.loss_of(self.views, self.labels)

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of the loss by parameter; zeros for frozen parameters and those that it does not depend on."""
        import torch

        found = torch.autograd.grad(self.loss, list(self.trained.values()), allow_unused=True)
        pairs = list(zip(self.trained.items(), found, strict=True))
        self.unused |= {name for (name, _), gradient in pairs if gradient is None}
        return self.with_zeros({n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs})

    def with_zeros(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of the trained parameters with zeros for the frozen ones, in the order of the model's."""
        import torch

        whole = dict(gradients) | {name: torch.zeros_like(p) for name, p in self.frozen.items()}
        return {name: whole[name] for name in self.names}


def local_step(
    model: BuiltModel,
    freezes: Callable[[str], bool],
    views: tuple[ClientInput, ...],
    labels: Tensor | None,
    loss_of: Callable[[tuple[ClientInput, ...], Tensor | None], Tensor],
) -> LocalStep:
    """A step of a client that freezes the parameters whose names `freezes` says; see `LocalStep`."""
    parts: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}
    parameters = dict(model.module.named_parameters())
    for name, parameter in parameters.items():
        parts[freezes(name)][name] = parameter
    return LocalStep(model, views, labels, loss_of, parts[False], parts[True], tuple(parameters))
