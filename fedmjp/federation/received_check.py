"""A Flower client mod that checks the model that a client is sent, before the client trains on it.

    check = ReceivedCheck(of_model(model, first_batch), refuse=True)
    app = ClientApp(mods=[check])  # or @app.train(mods=[check])

It warns, or refuses if a statistic alarms: then the client's training function is not called, and the reply is an error
with the reason, as if the client had failed. What a client was sent in the last round that did not alarm stays in
Flower's state of the node (`context.state`), to compare the next one with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from attacks.registry import UsageError
from fedmjp.audit.observe import model_as_sent
from fedmjp.detect import Detector, Received, Report, received_by
from fedmjp.federation.boundary import DECLINED
from fedmjp.messages import tensors_of

LAST = "fedmjp.detect/"  # begins the names of what the mod keeps in a node's state

# (message content, content of the last message that did not alarm or None, context) -> what the statistics read.
ReadContent = Callable[[RecordDict, RecordDict | None, Context], Received]
FirstBatch = Callable[[RecordDict, Context], tuple[Tensor, Tensor | None]]

logger = logging.getLogger(__name__)


def warn(report: Report, context: Context) -> None:
    """Log the alarms of a node as one warning."""
    logger.warning("node %s was sent a suspicious model: %s", context.node_id, report.reason)


@dataclass(frozen=True)
class ReceivedCheck:
    """Flower mod: check what each training message holds.

    Args:
        read: makes what the statistics read from a message (`of_model`).
        detector: the statistics and their thresholds.
        refuse: reply with an error instead of training, if a statistic alarms.
        on_alarm: called with the report and the node's context if a statistic alarms; by default it is logged.
        training: name of the training that the messages are of, where a node takes part in several: only messages of
            the same one are compared.
    """

    read: ReadContent
    detector: Detector = field(default_factory=Detector)
    refuse: bool = False
    on_alarm: Callable[[Report, Context], None] = warn
    training: str = ""

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """See Flower's `Mod`; messages that do not ask for training are passed on."""
        if not message.metadata.message_type.startswith(MessageType.TRAIN):
            return call_next(message, context)
        report = self.detector.inspect(self.read(message.content, self._last(context), context))
        for warning in report.warnings:
            logger.warning("node %s: %s", context.node_id, warning)
        if not report.suspicious:
            self._keep(context, message.content)
            return call_next(message, context)
        self.on_alarm(report, context)
        if self.refuse:
            return Message(Error(DECLINED, report.reason), reply_to=message)
        return call_next(message, context)

    @property
    def _prefix(self) -> str:
        """Begins the names of what is kept of this training."""
        return f"{LAST}{self.training}/"

    def _last(self, context: Context) -> RecordDict | None:
        prefix = self._prefix
        kept = {key.removeprefix(prefix): record for key, record in context.state.items() if key.startswith(prefix)}
        return RecordDict(kept) if kept else None

    def _keep(self, context: Context, content: RecordDict) -> None:
        for key, record in content.items():
            if isinstance(record, ArrayRecord):
                context.state[self._prefix + key] = record


def of_model(model: nn.Module, first_batch: FirstBatch) -> ReadContent:
    """Reads messages that hold the parameters of `model` by their names, as `ArrayRecord(model.state_dict())` does.

    Args:
        model: of the client's own code; it is copied, not changed.
        first_batch: from the message's content and the node's context to the inputs (B, C, H, W) and labels (B,) of the
            batch that the client will train on first, as the model sees them. Labels None: the gradients of single
            images are not computed, and nothing but the weights is checked.
    """

    def read(content: RecordDict, last: RecordDict | None, context: Context) -> Received:
        """What the statistics read of a message; `UsageError` for an array that the model lacks."""
        sent, known = tensors_of(content), model.state_dict()
        strange = next((n for n in sent if n not in known or known[n].shape != sent[n].shape), None)
        if strange is not None:
            raise UsageError(
                f"the message holds {strange} {tuple(sent[strange].shape)}, which the client's model lacks"
            )
        images, labels = first_batch(content, context)
        previous = None if last is None else known | tensors_of(last)  # what is not sent stays as it is
        return received_by(model_as_sent(model, sent), images, labels, previous=previous)

    return read
