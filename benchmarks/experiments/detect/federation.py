"""One federation of honest clients, and what its clients see of the models that they are sent, or could be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from attacks import ATTACKS, Observation, ThreatModel, UsageError
from attacks.active.base import ActiveAttack, SendContext
from attacks.memory import remember
from fedmjp.audit.observe import model_as_sent, observe_update
from fedmjp.client import ClientTask, shared_task
from fedmjp.config import RunConfig
from fedmjp.detect import STATISTICS, Measurement
from fedmjp.detect.clients import received_in
from fedmjp.federation import build_client_app, run_rounds
from fedmjp.federation.local_grid import LocalGrid

GRANTS = ThreatModel.parse(("active_parameters", "model_weights", "position_gradient", "several_rounds"))
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Turn:
    """A client's turn in a round, before it trains.

    Attributes:
        task: of the federation.
        round: from 1.
        client: from 0.
        state: what an honest server sends it.
        previous: what it was sent in the round before; None in the first.
    """

    task: ClientTask
    round: int
    client: int
    state: State
    previous: State | None

    def measure(self, changes: State | None = None) -> dict[str, Measurement]:
        """Every statistic of the model as it is sent, with other values of the parameters in `changes`."""
        self.task.load({**self.state, **(changes or {})})
        received = received_in(self.task, self.client, self.round, self.previous)
        return {name: STATISTICS.get(name)().measure(received) for name in STATISTICS}

    def prepare(self, attack: ActiveAttack, history: list[Observation]) -> dict[str, Tensor]:
        """What an attack sends the client instead."""
        model = model_as_sent(self.task.model.module, self.state)
        built = self.task.model
        return dict(attack.send(SendContext(model, self.shape, built.mean, built.std, history)).parameters)

    def answer(self, attack: ActiveAttack, changes: State) -> Observation:
        """The update of a client that is sent `changes`, as the server sees it."""
        sent = {**self.state, **changes}
        result = self.task.update(self.client, self.round, sent)
        return observe_update(
            self.task,
            GRANTS,
            model=model_as_sent(self.task.model.module, sent),
            round=self.round,
            client=self.client,
            sent=sent,
            received={name: tensor.clone() for name, tensor in result.tensors.items()},
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an input."""
        return 3, self.task.model.image_size, self.task.model.image_size


def active_attacks(task: ClientTask, say: Callable[[str], None]) -> dict[str, ActiveAttack]:
    """The registered attacks that choose what is sent, with their own settings, that can prepare the task's model.

    Args:
        say: called with a line for each that is left out.
    """
    kinds = {name: kind for name, kind in ATTACKS.available().items() if issubclass(kind, ActiveAttack)}
    turn, found = Turn(task, 1, 0, task.parameters, None), {}
    for name, attack in ((name, kind()) for name, kind in kinds.items()):
        try:
            attack.require(GRANTS, name)
            turn.prepare(attack, [])
        except UsageError as error:
            say(f"{name} is left out: {error}")
        else:
            found[name] = attack
    return found


def held_once(turn: Turn) -> int:
    """A class of which the client's batch holds as few images as of any, one if there is such a class."""
    labels = turn.task.batch(turn.client, turn.round, 0).labels.tolist()
    return min(sorted(set(labels)), key=labels.count)


def probes(turn: Turn, attack: ActiveAttack, count: int) -> Iterator[tuple[State, Callable[[], Observation], list]]:
    """What an attack sends a client in `count` prepared rounds in a row on the same batch and weights.

    Yields what is sent, a function that trains on it, and the history before.
    """
    history: list[Observation] = []
    for number in range(count):
        changes = turn.prepare(attack, history)
        seen: list[Observation] = []

        def answer(changes: State = changes, seen: list[Observation] = seen) -> Observation:
            """The client's update, computed once."""
            seen.extend([turn.answer(attack, changes)] * (not seen))
            return seen[0]

        yield changes, answer, list(history)
        if number + 1 < count:
            view = answer()
            history.append(remember(view, attack.remembered_layers(view.model, turn.shape)))


def train(config: RunConfig, on_turn: Callable[[Turn], None], on_round: Callable[[], None]) -> None:
    """Train a federation of honest clients in this process.

    Args:
        on_turn: called before each client's training.
        on_round: called after each round.
    """
    (defense,) = config.defense
    task = shared_task(config.order(), defense, config.client_entropy())
    last: dict[int, State] = {}

    def on_send(round: int, client: int, state: State) -> None:
        """Every client is sent the model as it is."""
        on_turn(Turn(task, round, client, state, last.get(client)))
        last[client] = state

    run_rounds(
        LocalGrid(build_client_app(config.client_entropy()), config.federation.clients),
        task,
        defense,
        on_update=lambda view: None,
        on_round=lambda number, state: on_round(),
        on_send=on_send,
    )


def plain(config: RunConfig) -> RunConfig:
    """The same federation, evaluated only at its ends."""
    return replace(config, federation=replace(config.federation, evaluate_every=config.federation.rounds))
