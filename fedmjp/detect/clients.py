"""What a client of our own federation knows of a round before it trains."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attacks.classifier import classifier_of
from fedmjp.client import ClientTask
from fedmjp.detect.received import AT_ONCE, ImageNorms, Received, image_norms


def received_in(task: ClientTask, client: int, round: int, previous: Mapping[str, Tensor] | None) -> Received:
    """What `client` knows before its first step of a round, of the weights that are loaded in `task`.

    The batch is the one that it would train on, after the defence on the input. What a model draws itself (dropout,
    skipped blocks) is left out: the model is put in evaluation mode.

    Args:
        round: number of the round, from 1.
        previous: the parameters by name that it was sent before, if any.
    """
    module, size = task.model.module.eval(), task.model.image_size
    layer = classifier_of(module, (3, size, size))

    def norms() -> ImageNorms:
        """Of the client's first batch."""
        return image_norms(task.local_step(client, round, 0), layer, AT_ONCE)

    single = task.learner.objective.per_image and task.data.labelled
    return Received(module, layer, previous, norms if single else None)
