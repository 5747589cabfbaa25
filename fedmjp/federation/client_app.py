"""Flower's ClientApp: receives weights, replies with an update. Every engine and `flwr run` use the same app.

Each message contains the run's configuration, because Flower's simulation starts clients with an empty run_config.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmjp.client import ClientTask, shared_task
from fedmjp.federation.wire import KEPT, LAYERS, flat, layout_of, pack, unpack
from fedmjp.records.provenance import source

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Reply with the id of the data partition that this node holds, and which code it runs."""
    node = MetricRecord({"partition-id": _partition(context)})
    return Message(RecordDict({"node": node, "code": ConfigRecord({"source": source()})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this node's partition and reply with the update."""
    instructions = message.content["instructions"]
    task = shared_task(str(instructions["config"]), str(instructions["defense"]), str(instructions.get(LAYERS, "")))
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
