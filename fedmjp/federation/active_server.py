"""An active server in a user's own Flower app: it chooses what some clients are sent; a `Watcher` reads the replies.

    watcher = Watcher(model, ..., attacks=["fishing"], threat_model=ThreatModel.parse([..., "active_parameters"]))
    FedAvg().start(TapGrid(grid, ActiveServer(watcher)), initial_arrays, num_rounds=3)

The strategy never learns of it: for a client that was sent other parameters it gets a reply that holds the weights that
it had sent itself (or a gradient of zeros), with the client's own metrics, as if the client had not moved. The other
clients' training is what it would be, and the mean moves by their share of the examples.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        self.watcher, self.clients, self.attack = watcher, clients, _active(watcher)
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
        changes = self.attack.prepare(model, self.watcher.shape, self.watcher.earlier(node))
        values = model.state_dict() | changes
        own = {
            "weights": tensors_of(content),
            "gradient": {n: torch.zeros_like(t) for n, t in tensors_of(content).items()},
        }
        return Turn(_with(content, values), lambda reply: _with(reply, own[self.watcher.sends]))


def _active(watcher: Watcher) -> ActiveAttack:
    entries = [watcher.attacks] if isinstance(watcher.attacks, str | ActiveAttack) else list(watcher.attacks)
    found = [entry for entry in entries if isinstance(entry, ActiveAttack)]
    named = active_attack([entry for entry in entries if isinstance(entry, str)])
    found += [named[1]] if named else []
    if len(found) != 1:
        raise UsageError(f"an active server needs one attack that chooses what is sent; the watcher has {len(found)}")
    return found[0]


def _with(content: RecordDict, values: Mapping[str, Tensor]) -> RecordDict:
    """The message with other values of the arrays that `values` names, in their types."""
    changed = {}
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {
                name: Array(values[name].detach().cpu().numpy().astype(array.dtype)) if name in values else array
                for name, array in record.items()
            }
            record = ArrayRecord(arrays)
        changed[key] = record
    return RecordDict(changed)
