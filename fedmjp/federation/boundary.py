"""The boundary between clients and server: a reply is checked whole, once, before any arithmetic and before the audit.

`CheckedGrid` wraps the grid that connects to the clients. A training reply that is not what the server has ordered
becomes an error reply with the reason, as if the client had failed; the strategy decides what follows. Replies of nodes
that were not asked, and second replies, are dropped. Nothing here trusts a length, a type or a number that a client
sent: the header of an array is read before its data, and the data are never unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedmjp.errors import ClientFailure
from fedmjp.federation.tap import WrappedGrid
from fedmjp.federation.wire import Layout, all_finite, count_of, flat
from fedmjp.records.provenance import source

REFUSED = 1000  # error code of a reply that did not pass, and of an order that a node refuses
DECLINED = 1001  # error code of a client's reply that refuses the model that it was sent
NODE_FAILED = 1002  # error code of a node that gives no reason
MOST_WORDS = 200  # characters of a client's reason that are passed on


@dataclass(frozen=True)
class Expected:
    """What a training reply must hold.

    Attributes:
        arrays: part of the update ("parameters", "buffers") -> number of its values.
        examples: node id -> images that the client was ordered to train on in this round.
        added: node id -> values of the parameters that the model which this client was sent has beside the others.
    """

    arrays: Mapping[str, int]
    examples: Callable[[int], int]
    added: Callable[[int], int] = lambda node: 0

    @classmethod
    def of(
        cls,
        parameters: Layout,
        buffers: Layout,
        examples: Callable[[int], int],
        added: Callable[[int], int] = lambda node: 0,
    ) -> Expected:
        """From the layouts of the model's parameters and float buffers."""
        return cls({"parameters": count_of(parameters), "buffers": count_of(buffers)}, examples, added)

    def why_not(self, content: RecordDict, node: int) -> str:
        """Why a reply of that node is refused, as the end of a sentence about it; "" if it is as it should be."""
        update, metrics = content.get("update"), content.get("metrics")
        if not isinstance(update, ArrayRecord) or not isinstance(metrics, MetricRecord):
            return "sent no update with its metrics"
        if set(update) != set(self.arrays):
            return f"sent the arrays {_names(update)} instead of {_names(self.arrays)}"
        counts = {
            part: count + (self.added(node) if part == "parameters" else 0) for part, count in self.arrays.items()
        }
        reasons = (_why_not_array(part, update[part], count) for part, count in counts.items())
        return next(filter(None, reasons), "") or self._why_not_metrics(metrics, node)

    def _why_not_metrics(self, metrics: MetricRecord, node: int) -> str:
        count, loss = metrics.get("num-examples"), metrics.get("train-loss")
        wanted = self.examples(node)
        if type(count) is not int or count != wanted:
            return (
                f"says that it trained on {_short(count)} images, and was ordered to train on {wanted} (local_epochs "
                "are counted on the server's copy of the data: order local_steps where nodes hold others)"
            )
        if not isinstance(loss, (int, float)):
            return f"sent {_short(loss)} for its training loss"
        if not math.isfinite(loss):
            return f"reports a training loss of {loss}: training diverged; try a smaller --learning-rate"
        return ""


class CheckedGrid(WrappedGrid):
    """`grid`, whose training replies are what `expected` says, or errors."""

    def __init__(self, grid: Grid, expected: Expected) -> None:
        super().__init__(grid)
        self._expected = expected

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """At most one reply of each node that was asked; one that does not pass is an error reply."""
        outgoing = list(messages)
        waiting = {message.metadata.dst_node_id: message.metadata.message_type for message in outgoing}
        replies = self._grid.send_and_receive(outgoing, timeout=timeout)
        # A loop over the replies would hold each of them while the next is made.
        yield from filter(None, map(partial(self._checked, waiting), replies))

    def _checked(self, waiting: dict[int, str], reply: Message) -> Message | None:
        """The reply, or an error in its place; None if none is awaited of that node.

        Args:
            waiting: node id -> type of its message, for nodes that have not replied yet; the node is taken out.
        """
        node = reply.metadata.src_node_id
        kind = waiting.pop(node, None)
        if kind is None:
            return None
        if reply.has_content() and kind.startswith(MessageType.TRAIN):
            reason = self._expected.why_not(reply.content, node)
            if reason:
                return Message(Error(REFUSED, reason), metadata=reply.metadata)
        return reply


def failure_of(reply: Message) -> str:
    """What an error reply says of its client, as the end of a sentence: its first line, cut."""
    lines = (reply.error.reason or "").splitlines()
    words = (lines[0] if lines else "without a reason")[:MOST_WORDS]
    named = {REFUSED: words, DECLINED: f"refused the model that it was sent: {words}"}
    return named.get(reply.error.code, f"failed: {words}")


def partitions_by_node(grid: Grid, clients: int, timeout: float | None = None) -> dict[int, int]:
    """Query every node for its partition id; {node id: partition id} in the order of partitions.

    Args:
        clients: partitions of the data; their ids are 0..clients - 1.
        timeout: seconds to wait for replies.

    Raises:
        ClientFailure: a node replied with an error or with no such id, two have the same, one is missing, or one runs
            other code than the server.
    """
    queries = [Message(RecordDict(), node, MessageType.QUERY) for node in grid.get_node_ids()]
    found: dict[int, int] = {}
    for reply in grid.send_and_receive(queries, timeout=timeout):
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise ClientFailure(f"node {node} did not send its partition id: it {failure_of(reply)}")
        record = reply.content.get("node")
        partition = record.get("partition-id") if isinstance(record, MetricRecord) else None
        if type(partition) is not int or not 0 <= partition < clients:
            raise ClientFailure(
                f"node {node} sent the partition id {_short(partition)}; pass partition-id=0..{clients - 1} in its "
                "--node-config"
            )
        twin = next((other for other, own in found.items() if own == partition), None)
        if twin is not None:
            raise ClientFailure(
                f"nodes {twin} and {node} both hold partition {partition}: another one would never be trained; give "
                "each node a partition-id of its own"
            )
        code = reply.content.get("code")
        own = code.get("source") if isinstance(code, ConfigRecord) else None
        if own != source():
            raise ClientFailure(
                f"node {node} (partition {partition}) runs other code than the server ({_short(own)}, not "
                f"{source()!r}): install the same copy of FedMJP on both"
            )
        found[node] = partition
    lacking = sorted(set(range(clients)) - set(found.values()))
    if lacking:
        raise ClientFailure(
            f"no node holds partition {lacking[0]} of {clients}; start one with partition-id={lacking[0]}, or pass "
            f"--clients {len(found)}"
        )
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _why_not_array(part: str, array: Any, count: int) -> str:
    """Why an array of the update is refused; "" if it holds `count` finite float32 values in one row."""
    if not isinstance(array, Array):
        return f"sent no array of {part}"
    try:
        values = flat(array)
    except ValueError as error:
        return f"sent {part} that cannot be read ({error})"
    if values.shape != (count,):
        return f"sent {part} of the shape {tuple(values.shape)} where the model has {count} values"
    if not all_finite(values):
        return f"sent {part} with NaN or infinity: training diverged; try a smaller --learning-rate"
    return ""


def _short(value: Any) -> str:
    return repr(value)[:40] if value is not None else "nothing"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names)))[:MOST_WORDS] or "(none)"
