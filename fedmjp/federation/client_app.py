"""Flower's ClientApp: receives weights, answers with an update. The same app under every engine and under `flwr run`.

The run's configuration travels with each message, because Flower's simulation starts clients with an empty run_config.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmjp.client import ClientTask, shared_task
from fedmjp.federation.wire import flat, layout_of, pack, unpack

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Tell which partition of the data this node holds."""
    return Message(RecordDict({"node": MetricRecord({"partition-id": _partition(context)})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this node's partition and send the update."""
    order = message.content["order"]
    task = shared_task(str(order["config"]), str(order["defense"]))
    state = message.content["state"]
    weights = read_state(task, state)
    result = task.update(_partition(context), int(order["round"]), weights, state["parameters"].data)
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
    """Parameters and float buffers of the task's model as it stands."""
    return ArrayRecord({"parameters": pack(task.parameters), "buffers": pack(task.buffers)})


def read_state(task: ClientTask, record: ArrayRecord) -> dict:
    """Parameters and float buffers by name: views of the message's bytes, not to be written to.

    Raises:
        ValueError: another model's state.
    """
    state = unpack(flat(record["parameters"]), layout_of(task.parameters))
    return state | unpack(flat(record["buffers"]), layout_of(task.buffers))
