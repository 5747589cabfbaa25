"""An active server in a user's own Flower app: it chooses what some clients are sent; a `Watcher` reads the replies.

    watcher = Watcher(model, ..., attacks=["fishing"], threat_model=ThreatModel.parse([..., "active_parameters"]))
    FedAvg().start(TapGrid(grid, ActiveServer(watcher)), initial_arrays, num_rounds=3)

The strategy never learns of it: for a client that was sent another model it gets a reply that holds the weights that
it had sent itself (or a gradient of zeros), with the client's own metrics, as if the client had not moved. The other
clients' training is what it would be, and the mean moves by their share of the examples.

Layers that an attack adds (`active_architecture`) are sent as further arrays of the message, by name. They reach
clients whose program builds the model from what it is sent (`attacks.active.architecture.add_sent_layers`); another
program refuses arrays that it does not know, and trains nothing in that round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from attacks import UsageError
from attacks.active.base import ActiveAttack
from fedmjp.audit.observe import model_as_sent
from fedmjp.audit.suite import active_attack
from fedmjp.audit.watcher import Watcher
from fedmjp.federation.tap import Turn
from fedmjp.federation.wire import tensors_of


class ActiveServer:
    """Observer for `TapGrid`: what `watcher` does, and the server's turn to send before it.

    Args:
        watcher: of whose attacks one chooses what is sent.
        clients: how many nodes are attacked, the first ones that are sent a training message.

    Raises:
        UsageError: none of the watcher's attacks chooses what is sent, or several do.
    """

    def __init__(self, watcher: Watcher, clients: int = 1) -> None:
        self.watcher, self.clients = watcher, clients
        self.attack = _active(watcher).granted(watcher.threat_model)
        self._first: dict[int, nn.Module] = {}  # by node, the first model that it would have been sent

    def __call__(self, sent: RecordDict, received: RecordDict, node: int) -> None:
        """See `Watcher`."""
        self.watcher(sent, received, node)

    def round_done(self) -> None:
        """See `Watcher.round_done`."""
        self.watcher.round_done()

    def prepare(self, content: RecordDict, node: int) -> Turn | None:
        """See `TapGrid`. What goes wrong is a line in the watcher's `problems`, and the message is sent as it is."""
        if node not in self._first and len(self._first) >= self.clients:
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
        w = self.watcher
        sending = self.attack.send(model, w.shape, w.earlier(node), mean=w.mean, std=w.std)
        values, usual = model.state_dict() | dict(sending.parameters), tensors_of(content)
        added = {name: value for name, value in values.items() if name not in model.state_dict()}
        own = {"weights": usual, "gradient": {n: torch.zeros_like(t) for n, t in usual.items()}}
        return Turn(_with(content, values, added), lambda reply: _with(reply, own[w.sends], left_out=added))


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
    """The message with other values of the arrays that `values` names, in their types.

    Args:
        added: names in `values` of arrays that the message lacks; they join its first arrays.
        left_out: names of arrays to leave out.
    """
    changed, missing = {}, list(added)
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {
                name: Array(values[name].detach().cpu().numpy().astype(array.dtype)) if name in values else array
                for name, array in record.items()
                if name not in left_out
            }
            record = ArrayRecord(arrays | {name: Array(values[name].detach().cpu().numpy()) for name in missing})
            missing = []
        changed[key] = record
    return RecordDict(changed)
