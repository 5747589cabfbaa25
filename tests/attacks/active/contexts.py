"""What a server knows before it sends a model, from what a test has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from attacks import Observation
from attacks.active.base import SendContext
from fedmjp.models import BuiltModel


def before(
    model: BuiltModel | nn.Module, image_shape: tuple[int, int, int], history: Sequence[Observation] = ()
) -> SendContext:
    """The context of a model as it is; of one that was not built here, of a normalisation that changes nothing."""
    if isinstance(model, BuiltModel):
        return SendContext(model.module, image_shape, model.mean, model.std, history)
    return SendContext(model, image_shape, (0.0,) * 3, (1.0,) * 3, history)
