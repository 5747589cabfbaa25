"""What attacks of an active server have in common: the server's turn to send, before the client's to answer.

An active attack is asked twice in a round. `send` gives what one client is sent instead of the server's own model:
other values of its parameters, and other layers where the threat model grants them (`sent_to` makes the whole model of
it, for each client of a group); `reconstruct` reads the update that comes back, like any attack. Nothing is kept in
between: every observation holds the model that its client was sent, so that the past is read from the observations.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.active.architecture import change_layers
from attacks.base import Attack
from attacks.linear.position_rows import position_gradient
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

MOVED = (
    "the client hides positions (MJP), or sends nothing that would show it: images are as the model was fed them, with "
    "patches that it may have moved, and the update of a batch does not say which"
)


@dataclass(frozen=True)
class SendContext:
    """What the server knows before it sends a client a model.

    Attributes:
        model: in evaluation mode, with the weights that the server would send otherwise; no attack changes it.
        image_shape: (C, H, W) of an input.
        mean, std: the clients' normalisation, which the server orders; one number a channel.
        history: the client's earlier updates that the server has, oldest first, prepared or not.
    """

    model: nn.Module
    image_shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    history: Sequence[Observation] = ()


@dataclass(frozen=True)
class Sending:
    """What a client is sent instead of the server's own model.

    Attributes:
        parameters: other values, by name; of the layers that are added, all.
        layers: what is changed of the architecture, as `change_layers` reads it; "" for nothing.
    """

    parameters: Mapping[str, Tensor]
    layers: str = ""

    def model(self, model: nn.Module, image_shape: tuple[int, int, int]) -> nn.Module:
        """The model as the client is sent it, in evaluation mode; `model` is not changed."""
        sent = copy.deepcopy(model)
        change_layers(sent, image_shape, self.layers)
        state = sent.state_dict()
        with torch.no_grad():
            for name, value in self.parameters.items():
                state[name].copy_(value)
        return sent.eval()


@dataclass(frozen=True, kw_only=True)
class ActiveAttack(Attack):
    """A server that chooses the model that a client is sent, and reads single images from the update."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS})
    reads_zeros: ClassVar[bool] = True  # a unit that no input has switched on
    # Whether a client is to be sent the same parameters in every round but for those that `send` names.
    same_model: ClassVar[bool] = False
    # Whether one client of a sum is sent the prepared model and the others one that sends nothing.
    single_out: ClassVar[bool] = False

    @abstractmethod
    def send(self, context: SendContext) -> Sending:
        """What the attack changes of the model that a client is sent.

        Raises:
            UsageError: the model has no part that the attack sets.
        """

    def sent_to(self, context: SendContext, place: int = 0) -> Sending:
        """The whole model that a client is sent, every value by name.

        Args:
            place: of the client in the group whose sum the server sees; all are sent the same, but see `single_out`.

        Raises:
            UsageError: see `send`.
        """
        sending = self.send(context)
        return replace(sending, parameters={**context.model.state_dict(), **sending.parameters})

    @abstractmethod
    def check_prepared(self, observation: Observation) -> None:
        """Raise `UsageError` if the model that the client was sent is not one that this attack has set."""

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: the model that the client was sent was not prepared."""
        try:
            self.check_prepared(observations[-1])
        except UsageError as error:
            return str(error)
        return ""


def hides_positions(observation: Observation) -> bool:
    """Whether the client hid positions in this step, or may have: the embedding that hidden ones share has a gradient,
    or a model that can hide them sends no gradient of positions, which would show it."""
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    if not tokenizer.hides_positions:
        return False
    shared = tokenizer.shared_embedding(observation.gradients)
    return position_gradient(observation, tokenizer) is None or (shared is not None and bool(shared.any()))


def nobody(diagnosis: str, details: Mapping[str, float]) -> Reconstruction:
    """The answer where no image of the batch sent its gradient alone."""
    return Reconstruction(images=None, diagnosis=diagnosis, details=details)
