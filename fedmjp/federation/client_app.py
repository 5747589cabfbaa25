"""Flower's ClientApp: receives weights, replies with an update. Every engine and `flwr run` use the same app.

Each message contains the run's configuration, because Flower's simulation starts clients with an empty run_config.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedmjp.client import ClientTask, shared_task
from fedmjp.detect import Received
from fedmjp.detect.clients import received_in
from fedmjp.federation.boundary import DECLINED
from fedmjp.federation.received_check import ReceivedCheck
from fedmjp.federation.wire import KEPT, LAYERS, flat, layout_of, pack, unpack

app = ClientApp()
REFUSES = "refuse-suspicious"  # in a node's configuration


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Reply with the id of the data partition that this node holds."""
    return Message(RecordDict({"node": MetricRecord({"partition-id": _partition(context)})}), reply_to=message)


def refuse_suspicious(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: refuse a suspicious model, where the run asks for it or this node was started so.

    The node's own setting (`--node-config "refuse-suspicious=true"`) is what counts against a server: the run's options
    come from the server, which can ask for the check and not forbid it.
    """
    asked = _task(message.content).config.federation.refuse_suspicious
    if not asked and not context.node_config.get(REFUSES):
        return call_next(message, context)
    layers = message.content["instructions"].get(LAYERS)
    if layers:
        return Message(Error(DECLINED, f"the server changes the model's architecture ({layers})"), reply_to=message)
    return _CHECK(message, context, call_next)


def _received(content: RecordDict, last: RecordDict | None, context: Context) -> Received:
    """What a client knows of the weights that it was sent, which are then loaded."""
    task, state = _task(content), content["state"]
    task.load(read_state(task, state), state["parameters"].data)
    previous = None if last is None else read_state(task, last["state"])
    return received_in(task, _partition(context), int(content["instructions"]["round"]), previous)


_CHECK = ReceivedCheck(_received, refuse=True)


@app.train(mods=[refuse_suspicious])
def train(message: Message, context: Context) -> Message:
    """Train on this node's partition and reply with the update."""
    instructions = message.content["instructions"]
    task = _task(message.content)
    state = message.content["state"]
    weights = read_state(task, state)
    kept = read_kept(task, state)
    # What the objective keeps on the client stays in Flower's state of the node, and is in no message.
    if KEPT in context.state:
        kept = context.state[KEPT].to_torch_state_dict()
    client, number = _partition(context), int(instructions["round"])
    result = task.update(client, number, weights, state["parameters"].data, kept)
    if result.kept:
        context.state[KEPT] = ArrayRecord(result.kept)
    return Message(
        RecordDict(
            {
                "update": ArrayRecord({"parameters": pack(result.tensors), "buffers": pack(result.buffers)}),
                "metrics": MetricRecord({"num-examples": result.num_examples, "train-loss": result.loss}),
            }
        ),
        reply_to=message,
    )


def _task(content: RecordDict) -> ClientTask:
    """The task that a message is about."""
    instructions = content["instructions"]
    return shared_task(str(instructions["config"]), str(instructions["defense"]), str(instructions.get(LAYERS, "")))


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def pack_state(task: ClientTask) -> ArrayRecord:
    """Current parameters and float buffers of the task's model, and what the server keeps; one flat array each."""
    record = ArrayRecord({"parameters": pack(task.parameters), "buffers": pack(task.buffers)})
    if task.learner.objective.kept_by == "server":
        record[KEPT] = pack(task.learner.kept())
    return record


def read_state(task: ClientTask, record: ArrayRecord) -> dict:
    """Parameters and float buffers by name: views of the message's bytes, which must not be written to.

    Raises:
        ValueError: the record's length does not fit the task's model.
    """
    state = unpack(flat(record["parameters"]), layout_of(task.parameters))
    return state | unpack(flat(record["buffers"]), layout_of(task.buffers))


def read_kept(task: ClientTask, record: ArrayRecord) -> dict | None:
    """What the server keeps and sent (`Objective.kept_by`), by name, or None; see `read_state`."""
    return unpack(flat(record[KEPT]), layout_of(task.learner.kept())) if KEPT in record else None
