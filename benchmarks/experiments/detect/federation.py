"""One federation of honest clients, and what its clients see of the models that they are sent, or could be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from attacks import ATTACKS, Capability, Observation, ThreatModel, UsageError
from attacks.active.base import ActiveAttack, SendContext, Sending
from attacks.memory import remember
from experiments.detect.options import VARIANTS
from fedmjp.audit.observe import model_as_sent, observe_update
from fedmjp.budgets import build_attack
from fedmjp.client import ClientTask, shared_task
from fedmjp.config import RunConfig
from fedmjp.data import Gallery
from fedmjp.detect import STATISTICS, Measurement
from fedmjp.detect.clients import received_in
from fedmjp.federation import build_client_app, run_rounds
from fedmjp.federation.local_grid import LocalGrid

GRANTS = ThreatModel.parse(("active_parameters", "model_weights", "position_gradient", "several_rounds"))
State = Mapping[str, Tensor]
AS_IT_IS = Sending({})


@dataclass(frozen=True)
class Prepared:
    """What a server does whose model a client checks.

    Attributes:
        name: of the attack.
        attack: with its settings.
        place: of the client that checks in the group of clients whose sum the server sees; the one in place 0 is
            attacked.
    """

    name: str
    attack: ActiveAttack
    place: int = 0

    @property
    def threat_model(self) -> ThreatModel:
        """What the server is granted; other layers only where the attack adds some."""
        return ThreatModel(GRANTS.grants | (self.attack.needs & {Capability.ACTIVE_ARCHITECTURE}))


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

    def measure(self, sending: Sending = AS_IT_IS) -> dict[str, Measurement]:
        """Every statistic of the model as it is sent, with other values and layers where `sending` has some.

        The client builds the layers that it is sent; one of our own federation that checks refuses them instead.
        """
        task = self._built(sending)
        task.load({**self.state, **sending.parameters})
        received = received_in(task, self.client, self.round, self.previous)
        return {name: STATISTICS.get(name)().measure(received) for name in STATISTICS}

    def prepare(self, attack: ActiveAttack, history: list[Observation], place: int = 0) -> Sending:
        """What an attack sends the client instead, in its place of a group of clients."""
        built = self.task.model
        context = SendContext(model_as_sent(built.module, self.state), self.shape, built.mean, built.std, history)
        return attack.sent_to(context, place) if place else attack.send(context)

    def answer(self, prepared: Prepared, sending: Sending) -> Observation:
        """The update of a client that is sent `sending`, as the server sees it."""
        task, sent = self._built(sending), {**self.state, **sending.parameters}
        result = task.update(self.client, self.round, sent)
        return observe_update(
            task,
            prepared.threat_model,
            model=model_as_sent(self.task.model.module, sent),
            round=self.round,
            client=self.client,
            sent=sent,
            received={name: tensor.clone() for name, tensor in result.tensors.items()},
        )

    def attacked(self, place: int) -> Turn:
        """The turn of the client that is attacked where this one has `place` in its group: for 0 this one."""
        return replace(self, client=(self.client + place) % self.task.config.federation.clients)

    def _built(self, sending: Sending) -> ClientTask:
        """The task with the layers that are sent."""
        config, name = self.task.config, self.task.config.defense[0]
        return shared_task(config.order(), name, self.task.entropy, sending.layers) if sending.layers else self.task

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an input."""
        return 3, self.task.model.image_size, self.task.model.image_size


def active_attacks(task: ClientTask, say: Callable[[str], None]) -> list[Prepared]:
    """The registered attacks that choose what is sent, with their own settings and `VARIANTS` of them.

    Args:
        task: those that cannot prepare its model are left out.
        say: called with a line for each that is left out.
    """
    named = [(name, kind()) for name, kind in ATTACKS.available().items() if issubclass(kind, ActiveAttack)]
    wanted = [Prepared(*one) for one in named]
    wanted += [Prepared(name, build_attack(name, dict(settings)), place) for name, settings, place in VARIANTS]
    turn, found = Turn(task, 1, 0, task.parameters, None), []
    for prepared in wanted:
        try:
            prepared.attack.require(prepared.threat_model, prepared.name)
            turn.prepare(prepared.attack, [], prepared.place)
        except UsageError as error:
            say(f"{prepared.name} is left out: {error}")
        else:
            found.append(prepared)
    return found


def held_once(turn: Turn) -> int:
    """A class of which the client's batch holds as few images as of any, one if there is such a class."""
    labels = turn.task.batch(turn.client, turn.round, 0).labels.tolist()
    return min(sorted(set(labels)), key=labels.count)


def probes(turn: Turn, prepared: Prepared, count: int) -> Iterator[tuple[Sending, Callable[[], Observation], list]]:
    """What a server sends a client in `count` prepared rounds in a row on the same batch and weights.

    Yields what is sent, a function that trains the attacked client on what that one is sent, and the history before.
    Where the client that checks is another one of a sum, its own update is left out: of weights of zero it is zero but
    for the classifier's bias, which the attack does not read.
    """
    history: list[Observation] = []
    attacked, attack = turn.attacked(prepared.place), prepared.attack
    for number in range(count):
        sending = attacked.prepare(attack, history)
        seen: list[Observation] = []

        def answer(sending: Sending = sending, seen: list[Observation] = seen) -> Observation:
            """The attacked client's update, computed once."""
            seen.extend([attacked.answer(prepared, sending)] * (not seen))
            return seen[0]

        yield turn.prepare(attack, history, prepared.place), answer, list(history)
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


def trained_on(task: ClientTask) -> Gallery:
    """The training images that the clients of a federation see in any round."""
    f, train = task.config.federation, task.data.train
    turns = ((c, r) for c in range(f.clients) for r in range(1, f.rounds + 1))
    steps = ((c, r, step) for c, r in turns for step in range(f.steps_of(len(task.parts[c]))))
    seen = {name for place in steps for name in task.batch_ids(*place)}
    kept = [index for index, name in enumerate(train.ids) if name in seen]
    return Gallery(train.subset(kept), task.data.name, task.data.provenance)


def plain(config: RunConfig) -> RunConfig:
    """The same federation, evaluated only at its ends."""
    return replace(config, federation=replace(config.federation, evaluate_every=config.federation.rounds))
