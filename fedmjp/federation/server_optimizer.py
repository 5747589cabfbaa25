"""The server's optimiser: Flower's FedAvgM, FedAdam, FedYogi and FedAdagrad, applied to the mean of a round.

Flower's strategies collect every reply of a round before they average. Here the mean is streamed
(`fedmjp.federation.strategy`), and Flower's class gets it as the only reply of the round, so that its optimiser is used
as it is while memory does not grow with the clients.
"""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from torch import Tensor

from fedmjp.federation_options import FedAvg

WEIGHTS = "weights"
NODE = 1  # stands for all clients in the message that holds their mean


class ServerOptimizer:
    """What one of Flower's strategies makes of a round's mean.

    Args:
        settings: which one, and its settings; one that names no class of Flower's leaves the mean as it is.
        state: from `state` of an earlier one, to go on with.
    """

    def __init__(self, settings: FedAvg, state: dict[str, Tensor] | None = None) -> None:
        self._flower = getattr(flower, settings.flower)(**vars(settings)) if settings.flower else None
        for name, value in (state or {}).items():
            setattr(self._flower, name, self._wrapped(value.numpy()))

    def step(self, sent: Tensor, mean: Tensor, number: int) -> Tensor:
        """The new weights (n,).

        Args:
            sent: (n,) the weights that the clients were sent.
            mean: (n,) the mean of what they returned, or where the server's step on their gradients leads.
            number: of the round, from 1.
        """
        if self._flower is None:
            return mean
        before = sent.numpy()
        self._flower.current_arrays = (
            ArrayRecord({WEIGHTS: Array(before)}) if self._keeps_a_list() else {WEIGHTS: before}
        )
        content = {"arrays": ArrayRecord({WEIGHTS: Array(mean.numpy())}), "metrics": MetricRecord({"num-examples": 1})}
        arrays, _ = self._flower.aggregate_train(number, [Message(RecordDict(content), NODE, MessageType.TRAIN)])
        return torch.from_numpy(arrays[WEIGHTS].numpy()).float()

    def state(self) -> dict[str, Tensor]:
        """The moments by the name that Flower gives them, (n,) each; empty before the first step."""
        held = {name: getattr(self._flower, name, None) for name in ("momentum_vector", "m_t", "v_t")}
        unwrapped = {name: value[0 if name == "momentum_vector" else WEIGHTS] for name, value in held.items() if value}
        return {name: torch.from_numpy(np.asarray(value)).clone() for name, value in unwrapped.items()}

    def _keeps_a_list(self) -> bool:
        """Whether the class keeps its moments in a list of arrays (FedAvgM) instead of a mapping by name."""
        return isinstance(self._flower, flower.FedAvgM)

    def _wrapped(self, value: np.ndarray) -> list[np.ndarray] | dict[str, np.ndarray]:
        return [value] if self._keeps_a_list() else {WEIGHTS: value}
