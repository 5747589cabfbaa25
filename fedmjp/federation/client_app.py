"""Flower's ClientApp: receives weights, replies with an update. Every engine and `flwr run` use the same app.

Each message contains the run's configuration, because Flower's simulation starts clients with an empty run_config.

On a SuperNode the client draws its random numbers from a key of its own (`fedmjp.entropy`), which stays in Flower's
state of the node, takes from an order what its operator allows (`fedmjp.federation.node`), and says nothing of its
files when it fails. A simulation passes its clients' key instead, trusts itself, and shows what went wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedmjp.client import ClientTask, shared_task
from fedmjp.detect import Received
from fedmjp.detect.clients import received_in
from fedmjp.entropy import ClientEntropy
from fedmjp.federation.boundary import DECLINED, NODE_FAILED, REFUSED
from fedmjp.federation.node import FAILED, LOG, OrderRefused, note_round, order_on_node
from fedmjp.federation.received_check import LAST, ReceivedCheck
from fedmjp.federation.wire import KEPT, LAYERS, flat, layout_of, pack, unpack
from fedmjp.records.client_states import ClientStates, KeptArray
from fedmjp.records.provenance import source

DRAWN_FROM = "entropy"  # begins the names in a node's state of the keys that it draws from, which no message holds


def build_client_app(simulated: ClientEntropy | None = None, states: ClientStates | None = None) -> ClientApp:
    """The app of every client.

    Args:
        simulated: what the clients of a simulation draw from; None on SuperNodes, which draw from their own entropy.
        states: where the clients of a simulation write what they keep between rounds; None: in memory alone.
    """
    built = ClientApp()

    @built.query()
    def identify(message: Message, context: Context) -> Message:
        """Reply with the id of the data partition that this node holds, and which code it runs."""
        node = MetricRecord({"partition-id": _partition(context)})
        return Message(RecordDict({"node": node, "code": ConfigRecord({"source": source()})}), reply_to=message)

    @built.train()
    def train(message: Message, context: Context) -> Message:
        """Train on this node's partition and reply with the update."""
        if simulated is not None:
            return _simulated(message, context, simulated, states)
        try:
            instructions = message.content["instructions"]
            given, defense = str(instructions["config"]), str(instructions["defense"])
            order = order_on_node(given, defense, context.node_config)
            note_round(context.state, given, defense, int(instructions["round"]))
            return _train(message, context, order, _own_entropy(context, defense))
        except OrderRefused as refusal:
            LOG.error("%s", refusal)
            return Message(Error(REFUSED, str(refusal)), reply_to=message)
        except Exception:  # whatever its words are, they may tell the server of the node's files
            LOG.exception("the order failed")
            return Message(Error(NODE_FAILED, FAILED), reply_to=message)

    return built


app = build_client_app()


def _own_entropy(context: Context, defense: str) -> ClientEntropy:
    """The node's key under a defence, drawn when it is first needed in a run and kept in the node's state.

    One key for two defences would give both the same noise, which their updates of the first round then show.
    """
    name = f"{DRAWN_FROM}/{defense}"
    if name not in context.state:
        context.state[name] = ConfigRecord({"key": ClientEntropy.fresh().key})
    return ClientEntropy(bytes(context.state[name]["key"]))


def _simulated(message: Message, context: Context, entropy: ClientEntropy, states: ClientStates | None) -> Message:
    """Carry out an order of one's own process, with what the client kept before, even in a run that was interrupted."""
    instructions = message.content["instructions"]
    place = str(instructions["defense"]), _partition(context), int(instructions["round"])
    if states is not None and not _kept_under(place[0], context):
        for name, arrays in states.read(*place).items():
            context.state[name] = ArrayRecord({key: Array(*array) for key, array in arrays.items()})
    reply = _train(message, context, str(instructions["config"]), entropy)
    if states is not None and (kept := _kept_under(place[0], context)):
        states.write(*place, kept)
    return reply


def _kept_under(defense: str, context: Context) -> dict[str, dict[str, KeptArray]]:
    """What a node keeps for its next round under a defence: every defence has a federation of its own."""
    names = [n for n in context.state if n == f"{KEPT}/{defense}" or n.startswith(f"{LAST}{defense}/")]
    return {
        name: {key: KeptArray(a.dtype, tuple(a.shape), a.stype, a.data) for key, a in context.state[name].items()}
        for name in names
    }


def _train(message: Message, context: Context, order: str, entropy: ClientEntropy) -> Message:
    """Carry out an order."""
    instructions = message.content["instructions"]
    layers = str(instructions.get(LAYERS, ""))
    task = shared_task(order, str(instructions["defense"]), entropy, layers)
    if not task.config.federation.refuse_suspicious:
        return _update(task, message, context)
    if layers:
        return Message(Error(DECLINED, f"the server changes the model's architecture ({layers})"), reply_to=message)
    check = ReceivedCheck(partial(_received, task), refuse=True, training=str(instructions["defense"]))
    return check(message, context, partial(_update, task))


def _received(task: ClientTask, content: RecordDict, last: RecordDict | None, context: Context) -> Received:
    """What a client knows of the weights that it was sent, which are then loaded."""
    state = content["state"]
    task.load(read_state(task, state), state["parameters"].data)
    previous = None if last is None else read_state(task, last["state"])
    return received_in(task, _partition(context), int(content["instructions"]["round"]), previous)


def _update(task: ClientTask, message: Message, context: Context) -> Message:
    """Train, and reply with the update."""
    instructions, state = message.content["instructions"], message.content["state"]
    weights = read_state(task, state)
    kept = read_kept(task, state)
    # What the objective keeps on the client stays in Flower's state of the node, and is in no message.
    own = f"{KEPT}/{instructions['defense']}"  # every defence has a federation of its own
    if own in context.state:
        kept = context.state[own].to_torch_state_dict()
    client, number = _partition(context), int(instructions["round"])
    result = task.update(client, number, weights, state["parameters"].data, kept)
    if result.kept:
        context.state[own] = ArrayRecord(result.kept)
    return Message(
        RecordDict(
            {
                "update": ArrayRecord({"parameters": pack(result.tensors), "buffers": pack(result.buffers)}),
                "metrics": MetricRecord({"num-examples": result.num_examples, "train-loss": result.loss}),
            }
        ),
        reply_to=message,
    )


@dataclass(frozen=True)
class _State:
    """What `read_state` made of the bytes of parameters and buffers."""

    data: tuple[bytes, bytes]
    tensors: dict[str, Tensor]


_READ: WeakKeyDictionary[ClientTask, _State] = WeakKeyDictionary()  # the last state that was read for each task


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

    In one process all clients of a round receive the same bytes, whose views are made once for a task.

    Raises:
        ValueError: the record's length does not fit the task's model.
    """
    data = record["parameters"].data, record["buffers"].data
    if task not in _READ or any(new is not old for new, old in zip(data, _READ[task].data, strict=True)):
        state = unpack(flat(record["parameters"]), layout_of(task.parameters))
        _READ[task] = _State(data, state | unpack(flat(record["buffers"]), layout_of(task.buffers)))
    return dict(_READ[task].tensors)


def read_kept(task: ClientTask, record: ArrayRecord) -> dict | None:
    """What the server keeps and sent (`Objective.kept_by`), by name, or None; see `read_state`."""
    return unpack(flat(record[KEPT]), layout_of(task.learner.kept())) if KEPT in record else None
