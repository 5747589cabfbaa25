"""What attacks that set a model's classifier have in common: whose image sends a gradient alone, and how it is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.base import ActiveAttack, SendContext, Sending
from attacks.active.head import SetHead, find_head, read_head
from attacks.active.sums import CONSTANT, silent, with_constant
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ClassifierAttack(ActiveAttack):
    """A server that sets the classifier of the model that a client is sent, and reads single images from the update.

    Args:
        target: the class whose row is set.
        reader: the attack that reconstructs an image from the gradient that it sends alone, by name; auto:
            `mjp_subspace` where positions are hidden, else `patch_embedding`.
        single_out: of a sum over several clients, send one the prepared model and the others one that sends nothing
            (`attacks.active.sums`); else all the same.
    """

    target: int = 0
    reader: str = AUTO
    single_out: bool = False

    needs: ClassVar[frozenset[Capability]] = ActiveAttack.needs | {
        Capability.ACTIVE_PARAMETERS,
        Capability.POSITION_GRADIENT,
    }
    kind: ClassVar[str] = ""  # of fishing, in words

    def __post_init__(self) -> None:
        """Raise `UsageError` for a reader that is no attack."""
        from attacks import ATTACKS

        if self.reader != AUTO:
            ATTACKS.check(self.reader)

    def sent_to(self, context: SendContext, place: int = 0) -> Sending:
        """See `ActiveAttack.sent_to`: with `single_out`, all but the first of a group are sent weights of zero."""
        whole = super().sent_to(context, place)
        if not (place and self.single_out):
            return whole
        bias = f"{find_head(context.model, context.image_shape)}.bias"
        return replace(whole, parameters=silent(whole.parameters, bias))

    def check_prepared(self, observation: Observation) -> None:
        """See `ActiveAttack.check_prepared`."""
        self.head_of(observation)

    def remembered_layers(self, model: nn.Module, image_shape: tuple[int, int, int]) -> tuple[str, ...]:
        """See `Attack.remembered_layers`: the classifier."""
        return (find_head(model, image_shape),)

    @abstractmethod
    def is_own(self, head: SetHead) -> bool:
        """Whether a classifier is set as this attack sets it."""

    def head_of(self, observation: Observation) -> SetHead:
        """The classifier as the client was sent it.

        Raises:
            UsageError: it was not set by this attack.
        """
        find_tokenizer(observation.model, observation.image_shape)
        head = self.read_head(observation, find_head(observation.model, observation.image_shape))
        if not self.is_own(head):
            raise UsageError(f"the model that the client was sent was not prepared for {self.kind}")
        return head

    def read_head(self, observation: Observation, layer: str) -> SetHead:
        """The classifier as the client was sent it, with its constant feature; see `attacks.active.head.read_head`."""
        return read_head(observation, layer, CONSTANT if self.single_out else None)

    def classifier_of(self, context: SendContext, least: int = 0) -> tuple[str, nn.Linear]:
        """The model's classifier and its name.

        Args:
            least: smallest `target` that stands for something; -1 for a choice by the attack itself.

        Raises:
            UsageError: the model has no classifier that can be set, or no class `target`.
        """
        from attacks import ATTACKS

        layer = find_head(context.model, context.image_shape)
        head = context.model.get_submodule(layer)
        if not least <= self.target < len(head.weight):
            by_itself = " (or be -1: by itself)" if least < 0 else ""
            raise UsageError(
                f"{ATTACKS.name_of(type(self))}.target must lie in 0..{len(head.weight) - 1}{by_itself}, not "
                f"{self.target}"
            )
        return layer, head

    def counting(self, context: SendContext, layer: str, changes: dict[str, Tensor]) -> Sending:
        """What is sent, with the feature that counts the images of one client of a sum, where it is singled out."""
        if not self.single_out:
            return Sending(changes)
        return Sending(with_constant(context.model, context.image_shape, layer, changes))

    def read_alone(self, observation: Observation, gradients: Mapping[str, Tensor]) -> Reconstruction:
        """What `reader` finds in a gradient that one image of the batch has sent.

        Args:
            observation: the update that it is part of.
            gradients: by parameter name, of that image alone, of any scale.
        """
        from attacks import ATTACKS

        alone = replace(observation, gradients=gradients, num_examples=1, labels=None)
        if self.reader != AUTO:
            return ATTACKS.get(self.reader)()([alone])
        masked = ATTACKS.get("mjp_subspace")()
        return ATTACKS.get("patch_embedding")()([alone]) if masked.obstacle([alone]) else masked([alone])


def set_classifier(context: SendContext, layer: str, row: int, direction: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """A classifier of zeros but for one row, in the type of the model's own, and no localisation loss.

    MJP's localisation loss does not pass the classifier: it sends every image's mask to the position embedding. With
    the matrices of its map at zero it sends nothing. A map without parameters (pca) stays as it is.

    Args:
        layer: name of the classifier.
        row: the class.
        direction: (D,) its weights.
        bias: (K,).
    """
    head = context.model.get_submodule(layer)
    weight = torch.zeros_like(head.weight)
    weight[row] = direction.to(weight)
    localisation = find_tokenizer(context.model, context.image_shape).localisation
    maps = {} if localisation is None else dict(context.model.get_submodule(localisation).named_parameters())
    silent = {f"{localisation}.{name}": torch.zeros_like(p) for name, p in maps.items() if p.dim() > 1}
    return silent | {f"{layer}.weight": weight, f"{layer}.bias": bias.to(head.bias)}
