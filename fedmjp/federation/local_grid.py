"""Flower's Grid in this process: the default engine.

Messages are delivered to the ClientApp one at a time and each reply is yielded before the next message is delivered, so
that memory does not grow with the number of clients. There is no start-up time, no other process and no network. If a
client raises, the reply is an error message, as from a real SuperNode.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 1
CLIENT_FAILED = 2  # Flower's error code for an exception in a ClientApp


class LocalGrid(Grid):
    """A grid of `clients` nodes that run `client_app`; node n in 1..clients holds partition n - 1.

    Args:
        client_app: what every node runs.
        clients: number of nodes.
        run_config: what the app's `context.run_config` holds, as `flwr run` reads it from pyproject.toml.
    """

    def __init__(self, client_app: ClientApp, clients: int, run_config: Mapping[str, Any] | None = None) -> None:
        self._app = client_app
        self._replies: dict[str, Message] = {}
        self._run = Run.create_empty(RUN_ID)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, 0, 0
        self._contexts = {
            node: Context(
                RUN_ID,
                node,
                {"partition-id": node - 1, "num-partitions": clients},
                RecordDict(),
                dict(run_config or {}),
            )
            for node in range(1, clients + 1)
        }

    def set_run(self, run: Run) -> None:
        """Replace the run's description."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's description."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message from the server to node `dst_node_id`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes' ids, 1..clients."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages immediately; returns their ids, by which `pull_messages` finds the replies."""
        ids = []
        for message in messages:
            reply = self._deliver(message)
            self._replies[reply.metadata.reply_to_message_id] = reply
            ids.append(reply.metadata.reply_to_message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to pushed messages; each reply is returned only once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Deliver one message after the other and yield each reply before the next is delivered."""
        for message in messages:
            yield self._deliver(message)

    def _deliver(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = str(uuid4())
        node = message.metadata.dst_node_id
        delivered = Message(content=_copy(message.content), metadata=message.metadata)
        try:
            reply = self._app(delivered, self._contexts[node])
        except Exception as error:  # any exception of a client becomes an error message, as on a real node
            reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            reply = Message(Error(CLIENT_FAILED, reason), reply_to=delivered)
        return reply


def _copy(content: RecordDict) -> RecordDict:
    """A copy of the records for one client; the arrays' bytes are immutable and shared."""
    copies = {}
    for key, record in content.items():
        kind = next(k for k in (ArrayRecord, MetricRecord, ConfigRecord) if isinstance(record, k))
        copies[key] = kind(dict(record.items()))
    return RecordDict(copies)
