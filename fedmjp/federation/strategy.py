"""Flower's strategy of this project: FedSGD on gradients or FedAvg on weights, streamed.

Departs from Flower's FedAvg in four points: replies are added to a running mean as they come instead of being
collected; a client that fails stops the round instead of dropping out in silence; clients are ordered and sampled by
partition id, because node ids are random; and the sum is taken in that order under every engine, so that engines agree
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedmjp.errors import ClientFailure
from fedmjp.federation.wire import flat, pack


def partitions_by_node(grid: Grid) -> dict[int, int]:
    """Ask every node for its partition id; {node id: partition id} in the order of partitions.

    Raises:
        ClientFailure: a node does not answer.
    """
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in grid.get_node_ids()]
    found = {}
    for reply in grid.send_and_receive(questions):
        if reply.has_error():
            raise ClientFailure(f"a node does not tell its partition: {reply.error.reason.splitlines()[0]}")
        found[reply.metadata.src_node_id] = int(reply.content["node"]["partition-id"])
    return dict(sorted(found.items(), key=lambda item: item[1]))


class FederatedMean(Strategy):
    """Mean of the clients' updates, weighted by their number of examples.

    Args:
        order: what each client is told, beside the round: the run's configuration and the defence.
        update: "gradient" (the server descends along the mean gradient) or "weights" (the mean replaces them).
        learning_rate: of the server's step on gradients.
        per_round: clients drawn each round.
        seed: of the draw.
        first_round: number of the first round, above 1 when a run is resumed.
    """

    def __init__(
        self,
        *,
        order: dict[str, str],
        update: str,
        learning_rate: float,
        per_round: int,
        seed: int,
        first_round: int = 1,
    ) -> None:
        self.order, self.update, self.learning_rate = order, update, learning_rate
        self.per_round, self.seed, self.offset = per_round, seed, first_round - 1
        self.partitions: dict[int, int] = {}
        self._sent: ArrayRecord | None = None
        self._queue: list[int] = []

    def summary(self) -> None:
        """Nothing to log: the run's own report says more."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each drawn client, in the order of partitions."""
        self.partitions = self.partitions or partitions_by_node(grid)
        number = server_round + self.offset
        nodes = list(self.partitions)
        draw = np.random.default_rng(np.random.SeedSequence([self.seed, 4, number]))
        chosen = sorted(draw.choice(len(nodes), size=self.per_round, replace=False))
        self._sent, self._queue = arrays, [nodes[i] for i in chosen]
        order = ConfigRecord({**self.order, "round": number})
        content = RecordDict({"state": arrays, "order": order})
        return [Message(content, node, MessageType.TRAIN, group_id=str(number)) for node in self._queue]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Stream the replies into the mean and take the server's step.

        Raises:
            ClientFailure: a client answered with an error, not at all, or with NaN.
        """
        number = server_round + self.offset
        sums: dict[str, torch.Tensor] = {}
        examples, loss, clients = 0, 0.0, 0
        for reply in self._in_order(replies, number):
            metrics, update = reply.content["metrics"], reply.content["update"]
            weight = int(metrics["num-examples"])
            for part, array in update.items():
                values = flat(array)
                if part in sums:
                    sums[part].add_(values, alpha=weight)
                else:
                    sums[part] = values * weight
            self._check_finite(sums["parameters"], reply, number)
            examples, loss, clients = examples + weight, loss + weight * float(metrics["train-loss"]), clients + 1
        mean = {part: total.div_(examples) for part, total in sums.items()}
        if self.update == "gradient":
            mean["parameters"].mul_(-self.learning_rate).add_(flat(self._sent["parameters"]))
        arrays = ArrayRecord({part: pack({part: values}) for part, values in mean.items()})
        return arrays, MetricRecord({"train-loss": loss / examples, "clients": clients})

    def _in_order(self, replies: Iterable[Message], number: int) -> Iterator[Message]:
        """Replies in the order in which the clients were asked; early ones wait (never under the local engine)."""
        waiting: dict[int, Message] = {}
        turn = 0
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                raise ClientFailure(self._blame(node, number, f"failed: {reply.error.reason.splitlines()[0]}"))
            waiting[node] = reply
            while turn < len(self._queue) and self._queue[turn] in waiting:
                yield waiting.pop(self._queue[turn])
                turn += 1
        if turn < len(self._queue):
            raise ClientFailure(self._blame(self._queue[turn], number, "sent no reply"))

    def _check_finite(self, total: torch.Tensor, reply: Message, number: int) -> None:
        """A running sum turns NaN or infinite with the first such entry, so one look at it a client is enough."""
        if not torch.isfinite(total.sum()) and not torch.isfinite(total).all():
            raise ClientFailure(self._blame(reply.metadata.src_node_id, number, "sent an update with NaN or infinity"))

    def _blame(self, node: int, number: int, what: str) -> str:
        return f"round {number}: client {self.partitions.get(node, '?')} {what}"

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: the server evaluates on the test images itself."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None
