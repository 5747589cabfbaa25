"""What a node takes from the server's order, and what its operator holds fixed: `flower-supernode --node-config`.

Beside Flower's partition-id and num-partitions, a node configuration holds options of the run by their flat names, as
`--run-config` has them (`data="folder:DIR" defense="mjp:gamma=0.5" batch_size=1`):

- data, data_path, weights, from, device, threads, mask_key and refuse_suspicious are the node's own: they replace what
  the server orders. A path that is ordered beside a `data` of the node's own is dropped.
- Every other option must be ordered as the node has it; an order that differs is refused. A defence is compared with
  all its options.

A run is ordered once: its rounds come in order, each once and none above their number, under the options of the first
order. Otherwise a server could have a round repeated with other weights, with the same noise, masks and images.

A file is opened only where the node's own configuration names it: an order with a path is refused, whether the file
exists or not. What is refused, and what fails, reaches the server in one line that holds nothing of the node's files;
the reason stands in the node's log.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from attacks.registry import UsageError
from fedmjp.config import RunConfig, from_flat, option_places
from fedmjp.data.catalog import split_source
from fedmjp.models.registry import NAMED_WEIGHTS

OF_FLOWER = ("partition-id", "num-partitions")
OWN = ("data", "data_path", "weights", "from", "device", "threads", "mask_key", "refuse_suspicious")
# What a simulation alone decides, so that a node cannot hold it.
UNUSED = ("client_seed", "clients", "engine", "out", "resume", "log")
FAILED = "the node could not carry out the order; its own log says why"
ORDERS = "orders"  # of a node's state: digest of the run's options, and the last round under each defence
LOG = logging.getLogger(__name__)


class OrderRefused(Exception):
    """A node does not carry out an order; the message is what the server may know."""


def order_on_node(order: str, defense: str, node_config: Mapping[str, Any]) -> str:
    """The order as a node carries it out.

    Args:
        order: the configuration that the server sent, from `RunConfig.order`.
        defense: entry of its defence.
        node_config: of the node's operator.

    Returns:
        The order with the node's own options.

    Raises:
        OrderRefused: the order differs from what the node holds fixed, or names a file that the node does not.
        UsageError, ValueError: order or node configuration cannot be read; not for the server.
    """
    fixed = {name.replace("-", "_"): value for name, value in node_config.items() if name not in OF_FLOWER}
    unused = next((name for name in fixed if name in UNUSED), None)
    if unused:
        raise UsageError(f"--node-config {unused} has no effect on a node; leave it out")
    ordered = RunConfig.from_json(order)
    if defense not in ordered.defense:
        raise OrderRefused("refused the order: its defense is none of the run's")
    own = {name: value for name, value in fixed.items() if name in OWN}
    if "data" in own:
        own.setdefault("data_path", "")
    places = option_places()
    options = {name: v for name, v in fixed.items() if name in places and places[name][0][0] == "options"}
    _check_defense(ordered, defense, fixed.get("defense"), options)
    for name in fixed.keys() - own.keys() - options.keys() - {"defense"}:
        if from_flat({name: fixed[name]}, ordered) != ordered:
            raise OrderRefused(f"refused the order: this node holds another {name} fixed")
    named = "data" not in own and split_source(ordered.data.data)[1] is not None
    if named or "data_path" not in own and ordered.data.data_path is not None:
        raise OrderRefused("refused the order: data of a path are taken from --node-config only")
    if "weights" not in own and ordered.model.weights not in NAMED_WEIGHTS:
        raise OrderRefused("refused the order: weights of a path are taken from --node-config only")
    if "from" not in own and ordered.start.checkpoint is not None:
        raise OrderRefused("refused the order: the checkpoint of --from is taken from --node-config only")
    return from_flat(own, ordered).order()


def note_round(state: RecordDict, order: str, defense: str, number: int) -> None:
    """Keep in the node's state which round is carried out; once for each round, before the training.

    Args:
        state: Flower's state of the node, of one run.
        order: the configuration that the server sent.
        defense: entry of its defence.
        number: of the round, from 1.

    Raises:
        OrderRefused: the node has trained in this round or a later one under the defence, the run has no such round, or
            its options are not those of its first order.
    """
    digest, rounds = hashlib.sha256(order.encode()).hexdigest(), RunConfig.from_json(order).federation.rounds
    kept = state.setdefault(ORDERS, ConfigRecord({"digest": digest}))
    last = int(kept.get(f"round of {defense}", 0))
    if kept["digest"] != digest:
        raise OrderRefused("refused the order: its options are not those of the run's first order")
    if not last < number <= rounds:
        raise OrderRefused(f"refused the order: round {number} of {rounds} after round {last}; no round is repeated")
    kept[f"round of {defense}"] = number


def _check_defense(ordered: RunConfig, defense: str, fixed: str | None, options: Mapping[str, Any]) -> None:
    """Compare the defence that is ordered with the node's, both with all their options."""
    if fixed is None:
        if options:
            raise UsageError(f"--node-config {next(iter(options))} needs a defense beside it: orders may name another")
        return
    own = from_flat(dict(options)).defence(fixed)
    asked = from_flat({name: value for name, value in options.items() if name in OWN}, ordered).defence(defense)
    if asked != own:
        raise OrderRefused("refused the order: this node holds another defense fixed")
