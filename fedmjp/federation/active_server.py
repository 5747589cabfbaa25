"""An active server in a user's own Flower app: it chooses what some clients are sent; a `Watcher` reads the replies.

    watcher = Watcher(model, ..., attacks=["fishing"], threat_model=ThreatModel.parse([..., "active_parameters"]))
    FedAvg().start(TapGrid(grid, ActiveServer(watcher)), initial_arrays, num_rounds=3)

The strategy never learns of it: for a client that was sent another model it gets a reply that holds the weights that
it had sent itself (or a gradient of zeros), with the client's own metrics, as if the client had not moved. The other
clients' training is what it would be, and the mean moves by their share of the examples.

`sum_of` stands for secure aggregation: the watcher gets the sum over so many attacked nodes, and no reply by itself.
The masks of such a protocol are not run; the server knows the sum in either case. Where the attack singles one out, the
sum is the first node's update (`attacks.active.sums`); else it is the mean over all of them, one batch of their images,
and the watcher's `batch_size` is that of all together.

Layers that an attack adds (`active_architecture`) are sent as further arrays of the message, by name. They reach
clients whose program builds the model from what it is sent (`attacks.active.architecture.add_sent_layers`); another
program refuses arrays that it does not know, and trains nothing in that round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from attacks import UsageError
from attacks.active.base import ActiveAttack, SendContext
from fedmjp.audit.observe import model_as_sent
from fedmjp.audit.suite import active_attack
from fedmjp.audit.watcher import Watcher
from fedmjp.federation.tap import Turn
from fedmjp.messages import tensors_of


class ActiveServer:
    """Observer for `TapGrid`: what `watcher` does, and the server's turn to send before it.

    Args:
        watcher: of whose attacks one chooses what is sent.
        clients: how many nodes, or groups of `sum_of` nodes, are attacked, the first ones that are sent a training
            message.
        sum_of: nodes of whose replies the watcher gets the sum alone; 1 for each reply by itself.

    Raises:
        UsageError: none of the watcher's attacks chooses what is sent, or several do, or one singles a client out of a
            sum of one.
    """

    def __init__(self, watcher: Watcher, clients: int = 1, sum_of: int = 1) -> None:
        self.watcher, self.clients, self.sum_of = watcher, clients, sum_of
        self.attack = _active(watcher).granted(watcher.threat_model)
        if self.attack.single_out and sum_of < 2:
            raise UsageError("an attack with single_out takes a client out of a sum: pass sum_of=NUMBER of at least 2")
        if sum_of > 1:
            watcher.sees_sums(sum_of, self.attack.single_out)
        self._first: dict[int, nn.Module] = {}  # by node, the first model that it would have been sent
        self._sums: dict[int, _Sum] = {}  # by the first node of a group, of the present round

    def __call__(self, sent: RecordDict, received: RecordDict, node: int) -> None:
        """See `Watcher`; of a sum, called once all of its replies are there."""
        if self.sum_of == 1:
            self.watcher(sent, received, node)
        elif node in self._first:
            leader, place = self._group(node)
            total = self._sums.setdefault(leader, _Sum())
            try:
                total.add(sent if place == 0 else None, tensors_of(received))
            except UsageError as error:  # the app's training must go on; `round_done` names the sum
                self.watcher.problems.append(f"node {node}'s reply is in no sum: {error}")
                return
            if total.count == self.sum_of and total.sent is not None:
                share = 1.0 if self.attack.single_out else 1.0 / self.sum_of
                values = {name: value * share for name, value in self._sums.pop(leader).values.items()}
                self.watcher(total.sent, _with(received, values), leader)

    def round_done(self) -> None:
        """See `Watcher.round_done`; a sum that lacks a reply is not known."""
        for leader in self._sums:
            self.watcher.problems.append(f"the sum that node {leader} is part of lacks a reply: it was not attacked")
        self._sums.clear()
        self.watcher.round_done()

    def _group(self, node: int) -> tuple[int, int]:
        """The first node of an attacked node's group, and its own place in it."""
        nodes = list(self._first)
        group, place = divmod(nodes.index(node), self.sum_of)
        return nodes[group * self.sum_of], place

    def prepare(self, content: RecordDict, node: int) -> Turn | None:
        """See `TapGrid`. What goes wrong is a line in the watcher's `problems`, and the message is sent as it is."""
        if node not in self._first and len(self._first) >= self.clients * self.sum_of:
            return None
        try:
            return self._prepared(content, node)
        except Exception as error:  # the app's training must go on
            self.watcher.problems.append(f"node {node} was sent the model as it is: {error}".splitlines()[0])
            return None

    def _prepared(self, content: RecordDict, node: int) -> Turn:
        present = model_as_sent(self.watcher.model, tensors_of(content))
        model = self._first.setdefault(node, present) if self.attack.same_model else present
        self._first.setdefault(node, present)
        (leader, place), w = self._group(node), self.watcher
        context = SendContext(model, w.shape, w.mean, w.std, w.earlier(leader))
        usual = tensors_of(content)
        values = self.attack.sent_to(context, place).parameters
        values = {name: value.to(usual[name].dtype) if name in usual else value for name, value in values.items()}
        added = {name: value for name, value in values.items() if name not in model.state_dict()}
        own = {"weights": usual, "gradient": {n: torch.zeros_like(t) for n, t in usual.items()}}
        return Turn(_with(content, values, added), lambda reply: _with(reply, own[w.sends], left_out=added))


@dataclass
class _Sum:
    """Replies of a group's nodes, added up.

    Attributes:
        count: of replies.
        values: their sum by name, in float32 or the arrays' type.
        sent: what the group's first node was sent.
    """

    count: int = 0
    values: dict[str, Tensor] = field(default_factory=dict)
    sent: RecordDict | None = None

    def add(self, sent: RecordDict | None, values: Mapping[str, Tensor]) -> None:
        """Add one reply; `sent` is None but for the first node's.

        Raises:
            UsageError: it holds NaN or infinity, or other arrays than the replies before; the sum stays as it was.
        """
        for name, value in values.items():
            if not value.isfinite().all():
                raise UsageError(f"its array {name!r} holds NaN or infinity")
        if self.count and {n: v.shape for n, v in values.items()} != {n: v.shape for n, v in self.values.items()}:
            raise UsageError("it holds other arrays than those of the group's other nodes")
        self.count, self.sent = self.count + 1, self.sent or sent
        self.values = {n: value + self.values[n] if n in self.values else value for n, value in values.items()}


def _active(watcher: Watcher) -> ActiveAttack:
    entries = [watcher.attacks] if isinstance(watcher.attacks, str | ActiveAttack) else list(watcher.attacks)
    found = [entry for entry in entries if isinstance(entry, ActiveAttack)]
    named = active_attack([entry for entry in entries if isinstance(entry, str)])
    found += [named[1]] if named else []
    if len(found) != 1:
        raise UsageError(f"an active server needs one attack that chooses what is sent; the watcher has {len(found)}")
    return found[0]


def _with(
    content: RecordDict, values: Mapping[str, Tensor], added: Collection[str] = (), left_out: Collection[str] = ()
) -> RecordDict:
    """The message with other values of the arrays that `values` names.

    Args:
        added: names in `values` of arrays that the message lacks; they join its first arrays.
        left_out: names of arrays to leave out.
    """
    changed, missing = {}, list(added)
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {
                name: Array(values[name].detach().cpu().numpy()) if name in values else array
                for name, array in record.items()
                if name not in left_out
            }
            record = ArrayRecord(arrays | {name: Array(values[name].detach().cpu().numpy()) for name in missing})
            missing = []
        changed[key] = record
    return RecordDict(changed)
