"""The Flower strategy of this project: FedSGD on gradients or FedAvg on weights, with a streamed mean.

The server's optimiser is Flower's (`fedmjp.federation.server_optimizer`). The mean differs from Flower's FedAvg in four
points. Replies are added to a running sum as they arrive instead of being collected. A client that fails, or whose
reply the boundary refuses, is named; it stops the run unless `least_share` allows for it, and is never left out without
a message. Clients are ordered and sampled by partition id, because node ids are random. The sum is taken in that order
under every engine, so that all engines give identical results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedmjp.errors import ClientFailure
from fedmjp.federation.boundary import failure_of, partitions_by_node
from fedmjp.federation.server_optimizer import ServerOptimizer
from fedmjp.federation.wire import KEPT, all_finite, flat, pack


def sample_clients(clients: int, per_round: int, seed: int, round: int, always: Sequence[int] = ()) -> list[int]:
    """The clients of a round, rising.

    Args:
        clients: of the federation, numbered from 0.
        per_round: how many take part.
        seed: of the federation.
        round: its number, from 1.
        always: clients that take part in every round, at most `per_round`; the others are sampled.
    """
    draw = np.random.default_rng(np.random.SeedSequence([seed, 4, round]))
    others = [client for client in range(clients) if client not in always]
    chosen = draw.choice(others, size=per_round - len(always), replace=False)
    return sorted([*always, *chosen.tolist()])


class FederatedMean(Strategy):
    """Mean of the clients' updates, weighted by their number of examples.

    Args:
        instructions: entries of each client's message besides the round: the run's configuration and the defence.
        update: "gradient" (the server takes a step along the mean gradient) or "weights" (the mean replaces them).
        learning_rate: of the server's step on gradients.
        per_round: number of clients sampled each round.
        always: clients that take part in every round, at most `per_round`; the others are sampled.
        seed: of the sampling.
        first_round: number of the first round, above 1 if a run is resumed.
        optimizer: of the server, applied to the mean of the weights (and in "gradient", to where the step leads).
        clients: partitions of the data.
        least_share: share of a round's clients whose updates must arrive, in (0, 1]; with fewer the run stops.
        on_failure: called with round, client and reason for every client whose update is missing.
        round_timeout: seconds that the server waits for the clients' partition ids.
        keep: makes what the server keeps and sends beside the weights, from (state sent, new state, round); None if it
            keeps nothing.
    """

    def __init__(
        self,
        *,
        instructions: dict[str, str],
        update: str,
        learning_rate: float,
        per_round: int,
        seed: int,
        optimizer: ServerOptimizer,
        clients: int,
        least_share: float = 1.0,
        on_failure: Callable[[int, int, str], None] = lambda number, client, reason: None,
        round_timeout: float = 3600.0,
        first_round: int = 1,
        always: Sequence[int] = (),
        keep: Callable[[ArrayRecord, ArrayRecord, int], Array] | None = None,
    ) -> None:
        self.keep, self.optimizer = keep, optimizer
        self.instructions, self.update, self.learning_rate = instructions, update, learning_rate
        self.per_round, self.seed, self.offset = per_round, seed, first_round - 1
        self.clients, self.least_share, self.on_failure = clients, least_share, on_failure
        self.round_timeout, self.always = round_timeout, always
        self.partitions: dict[int, int] = {}
        self._sent: ArrayRecord | None = None
        self._queue: list[int] = []

    def summary(self) -> None:
        """Log nothing; the run has its own report."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each sampled client, in the order of partitions."""
        self.partitions = self.partitions or partitions_by_node(grid, self.clients, self.round_timeout)
        number = server_round + self.offset
        nodes = list(self.partitions)
        chosen = sample_clients(len(nodes), self.per_round, self.seed, number, self.always)
        self._sent, self._queue = arrays, [nodes[i] for i in chosen]
        instructions = ConfigRecord({**self.instructions, "round": number})
        content = RecordDict({"state": arrays, "instructions": instructions})
        return [Message(content, node, MessageType.TRAIN, group_id=str(number)) for node in self._queue]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Add the replies to the mean as they arrive, then take the server's step.

        Returns:
            The new state, and the mean training loss and number of clients. Replies of no examples (`tap.Turn`) count
            for nothing, and with no others the state stays as it was.

        Raises:
            ClientFailure: too few updates arrived; the message names the first client whose update is missing.
        """
        number = server_round + self.offset
        sums: dict[str, torch.Tensor] = {}
        examples, loss, clients = 0, 0.0, 0
        for weight, own_loss in map(partial(_add_update, sums), self._in_order(replies, number)):
            if weight:
                examples, loss, clients = examples + weight, loss + weight * own_loss, clients + 1
        if not examples:
            return self._sent, MetricRecord({"train-loss": float("nan"), "clients": clients})
        mean = {part: total.div_(examples) for part, total in sums.items()}
        if not all(map(all_finite, mean.values())):
            raise ClientFailure(
                f"round {number}: the mean of {clients} finite updates is not finite: training diverged; try a smaller "
                "--learning-rate"
            )
        if self.update == "gradient":
            mean["parameters"].mul_(-self.learning_rate).add_(flat(self._sent["parameters"]))
        mean["parameters"] = self.optimizer.step(flat(self._sent["parameters"]), mean["parameters"], number)
        arrays = ArrayRecord({part: pack({part: values}) for part, values in mean.items()})
        if self.keep is not None:
            arrays[KEPT] = self.keep(self._sent, arrays, number)
        return arrays, MetricRecord({"train-loss": loss / examples, "clients": clients})

    def _in_order(self, replies: Iterable[Message], number: int) -> Iterator[Message]:
        """Updates in the order of the clients' messages; early ones are kept (never under the local engine).

        One that is passed on is not held here, so that its memory is free when the next client trains.

        Raises:
            ClientFailure: too few are left.
        """
        waiting: dict[int, Message] = {}
        turn, missing = 0, []
        for reply in replies:
            waiting[reply.metadata.src_node_id] = reply
            del reply
            while turn < len(self._queue) and self._queue[turn] in waiting:
                if self._arrived(self._queue[turn], waiting, number, missing):
                    yield waiting.pop(self._queue[turn])
                turn += 1
        for node in self._queue[turn:]:
            if self._arrived(node, waiting, number, missing):
                yield waiting.pop(node)

    def _arrived(self, node: int, waiting: Mapping[int, Message], number: int, missing: list[str]) -> bool:
        """Whether the node's reply holds an update; else note the failure, in `missing` too.

        Raises:
            ClientFailure: so many are missing that fewer than `least_share` of the round's clients are left.
        """
        reply = waiting.get(node)
        if reply is not None and not reply.has_error():
            return True
        client, reason = self.partitions[node], "sent no reply" if reply is None else failure_of(reply)
        self.on_failure(number, client, reason)
        missing.append(f"round {number}: client {client} {reason}")
        if len(self._queue) - len(missing) < self.least_share * len(self._queue):
            others = f" (the last of {len(missing)} whose updates are missing)" if len(missing) > 1 else ""
            raise ClientFailure(missing[-1] + others)
        return False

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: the server evaluates on the test images itself."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None


def _add_update(sums: dict[str, torch.Tensor], reply: Message) -> tuple[int, float]:
    """Add a client's update to the sums by part, weighted by its examples; returns these and its training loss."""
    metrics, update = reply.content["metrics"], reply.content["update"]
    weight = int(metrics["num-examples"])
    for part, array in update.items() if weight else ():
        values = flat(array)
        if part in sums:
            sums[part].add_(values, alpha=weight)
        else:
            sums[part] = values * weight
    return weight, float(metrics["train-loss"])
