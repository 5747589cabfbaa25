"""A Grid that passes every training reply to an observer and returns it unchanged.

It wraps any Grid, so it can audit a user's own Flower app and strategy as well as ours. An observer may stand for an
active server too: it is asked before a training message is sent, and may send another one in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

Observer = Callable[[RecordDict, RecordDict, int], None]


@dataclass(frozen=True)
class Turn:
    """What one client is sent instead of the strategy's message.

    Attributes:
        content: of the message.
        pass_on: from the content of the client's reply to what the strategy gets as its reply, so that an update of
            other weights than its own does not enter the strategy's mean.
    """

    content: RecordDict
    pass_on: Callable[[RecordDict], RecordDict]


class WrappedGrid(Grid):
    """A grid that hands everything on to `grid`; what wraps a grid overrides `send_and_receive`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See the wrapped grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)

    def set_run(self, run: Run) -> None:
        """See the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """See the wrapped grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See the wrapped grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See the wrapped grid."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See the wrapped grid; replies to these messages are not observed."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See the wrapped grid; these replies are not observed."""
        return self._grid.pull_messages(message_ids)


class OrderedGrid(WrappedGrid):
    """`grid`, whose replies come in the order of the messages; early ones are kept (never under the local engine).

    One that is passed on is not held here, so that its memory is free when the next client trains.
    """

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """At most one reply of each node that was asked."""
        outgoing = list(messages)
        queue = deque(message.metadata.dst_node_id for message in outgoing)
        waiting: dict[int, Message] = {}
        for reply in self._grid.send_and_receive(outgoing, timeout=timeout):
            waiting[reply.metadata.src_node_id] = reply
            del reply
            while queue and queue[0] in waiting:
                yield waiting.pop(queue.popleft())
        yield from (waiting[node] for node in queue if node in waiting)


class TapGrid(WrappedGrid):
    """`grid`, with `observer(sent, received, node id)` called for each client's successful training reply.

    An observer that has a method `round_done` has it called, without arguments, after the last reply of each round of
    training. One that has a method `prepare` has it called as `prepare(content, node id)` before each training message
    is sent; it returns a `Turn`, or None to send the message as it is.
    """

    def __init__(self, grid: Grid, observer: Observer) -> None:
        super().__init__(grid)
        self._observer = observer

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Replies of the wrapped grid, each passed to the observer first; a list where that grid gives a list."""
        outgoing = list(messages)  # Flower's network grid iterates over them twice
        turns = self._prepare(outgoing)
        replies = self._grid.send_and_receive(outgoing, timeout=timeout)
        tapped = self._observed(outgoing, replies, turns)
        # Flower's strategies for differential privacy iterate over the replies twice.
        return list(tapped) if isinstance(replies, list) else tapped

    def _observed(
        self, outgoing: Sequence[Message], replies: Iterable[Message], turns: Mapping[int, Turn]
    ) -> Iterator[Message]:
        """Each reply after the observer has seen it."""
        sent: dict[int, RecordDict] = {
            message.metadata.dst_node_id: message.content
            for message in outgoing
            if message.metadata.message_type.startswith(MessageType.TRAIN)
        }
        yield from map(partial(self._observe, sent, turns), replies)  # a loop would hold a reply while the next is made
        if outgoing and outgoing[0].metadata.message_type.startswith(MessageType.TRAIN):
            getattr(self._observer, "round_done", lambda: None)()

    def _observe(self, sent: dict[int, RecordDict], turns: Mapping[int, Turn], reply: Message) -> Message:
        """The reply after the observer has seen it, if it is the first of a node that was sent a training message."""
        node = reply.metadata.src_node_id
        if node in sent and reply.has_content():
            self._observer(sent.pop(node), reply.content, node)
            if node in turns:
                reply.content = turns[node].pass_on(reply.content)
        return reply

    def _prepare(self, messages: Iterable[Message]) -> dict[int, Turn]:
        """Let the observer replace the content of training messages, in place; the turns that it took, by node."""
        prepare = getattr(self._observer, "prepare", None)
        turns: dict[int, Turn] = {}
        for message in messages if prepare is not None else ():
            if message.metadata.message_type.startswith(MessageType.TRAIN):
                node = message.metadata.dst_node_id
                turn = prepare(message.content, node)
                if turn is not None:
                    turns[node], message.content = turn, turn.content
        return turns
