"""Flower's ServerApp, and the training rounds of one federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from attacks.active.base import Sending
from fedmjp.client import ClientTask, shared_task
from fedmjp.federation.boundary import CheckedGrid, Expected
from fedmjp.federation.client_app import pack_state, read_kept, read_state
from fedmjp.federation.server_optimizer import ServerOptimizer
from fedmjp.federation.strategy import FederatedMean
from fedmjp.federation.tap import OrderedGrid, TapGrid, Turn
from fedmjp.federation.wire import LAYERS, count_of, flat, layout_of, pack, unpack
from fedmjp.records.server_state import ServerState

# (round, client, state by name) -> what to send instead, or None.
OnSend = Callable[[int, int, Mapping[str, Tensor]], Sending | None]


@dataclass(frozen=True)
class ServerView:
    """The data that the server has about one update.

    Attributes:
        round: number of the round, from 1.
        client: partition id, from 0.
        sent: parameters and float buffers that the client was sent, by name.
        received: gradients or weights that the client returned, by parameter name.
    """

    round: int
    client: int
    sent: Mapping[str, Tensor]
    received: Mapping[str, Tensor]


def run_rounds(
    grid: Grid,
    task: ClientTask,
    defense: str,
    *,
    on_update: Callable[[ServerView], None],
    on_round: Callable[[int, ServerState], None],
    on_failure: Callable[[int, int, str], None] = lambda number, client, reason: None,
    on_send: OnSend | None = None,
    first_round: int = 1,
    optimizer: Mapping[str, Tensor] | None = None,
) -> None:
    """Train from the current state of the task's model, and of what the server keeps, to the last configured round.

    Args:
        grid: connects to the clients.
        task: model, data and configuration.
        defense: name of the defence that the clients use.
        on_update: called with each client's update before it is added to the mean.
        on_round: called with the round's number and what the server holds after each round, and with first_round - 1
            before the first.
        on_failure: called with round, client and reason for each client that failed or whose reply was refused.
        on_send: the turn of an active server, called with round, client and the state by name before a client is sent
            it; it returns the parameters and layers to send instead, or None. The update of a client that was sent
            another model is observed, and does not enter the mean.
        first_round: number of the first round, above 1 if a run is resumed.
        optimizer: moments of the server's optimiser after the round before the first (`ServerState.optimizer`).

    Raises:
        ClientFailure: more clients failed than `--least-share` allows; the message names client and round.
    """
    f, state = task.config.federation, pack_state(task)
    server = ServerOptimizer(f.chosen_strategy(), dict(optimizer or {}))
    strategy = _strategy(task, defense, server, on_failure, first_round)
    server_side = _ServerSide(task, defense, strategy, on_update, on_send)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Hand on what the server holds after a round; Flower gets no metrics of it."""
        state = ServerState(read_state(task, arrays), read_kept(task, arrays) or {}, server.state())
        on_round(server_round + first_round - 1, state)
        return None

    checked = OrderedGrid(CheckedGrid(grid, server_side.expected()))  # rows follow the clients' order under any engine
    rounds = f.rounds - first_round + 1
    strategy.start(
        TapGrid(checked, server_side), state, num_rounds=rounds, timeout=f.round_timeout, evaluate_fn=evaluate
    )


def _strategy(
    task: ClientTask,
    defense: str,
    server: ServerOptimizer,
    on_failure: Callable[[int, int, str], None],
    first_round: int,
) -> FederatedMean:
    """The federation's strategy; see `run_rounds`."""
    f = task.config.federation

    def keep(sent: ArrayRecord, arrays: ArrayRecord, number: int) -> Array:
        """What the server keeps, after a round."""
        return pack(task.keep(read_state(task, arrays), read_kept(task, sent), number))

    return FederatedMean(
        instructions={"config": task.config.order(), "defense": defense},
        update=f.update,
        learning_rate=f.learning_rate,
        per_round=task.config.sampled(),
        always=task.config.always_asked(),
        seed=task.config.seed,
        optimizer=server,
        clients=f.clients,
        least_share=f.least_share,
        on_failure=on_failure,
        round_timeout=f.round_timeout,
        first_round=first_round,
        keep=keep if task.learner.objective.kept_by == "server" else None,
    )


@dataclass(frozen=True)
class _ServerSide:
    """What the server does at the tap: it observes updates and, if it is active, chooses what is sent.

    Attributes:
        layers: by node, what of the architecture was changed in the model that it was sent last.
        others: see `run_rounds`.
    """

    task: ClientTask
    defense: str
    strategy: FederatedMean
    on_update: Callable[[ServerView], None]
    on_send: OnSend | None
    layers: dict[int, str] = field(default_factory=dict)

    def task_of(self, node: int) -> ClientTask:
        """The task of a node: another one than the federation's where it was sent another architecture."""
        layers = self.layers.get(node, "")
        return shared_task(self.task.config.order(), self.defense, self.task.entropy, layers) if layers else self.task

    def expected(self) -> Expected:
        """What a client's reply must hold."""

        def examples(node: int) -> int:
            """Images of all local steps of the node's client."""
            return self.task.config.federation.batch_size * self.task.steps(self.strategy.partitions[node])

        usual = layout_of(self.task.parameters)

        def added(node: int) -> int:
            """Values that the node's model has beside those of the federation's."""
            own = self.task_of(node)
            return 0 if own is self.task else count_of(layout_of(own.parameters)) - count_of(usual)

        return Expected.of(usual, layout_of(self.task.buffers), examples, added)

    def __call__(self, sent: RecordDict, received: RecordDict, node: int) -> None:
        """Observe one update."""
        task = self.task_of(node)
        gradients = unpack(flat(received["update"]["parameters"]), layout_of(task.parameters))
        number, client = self._place(sent, node)
        self.on_update(ServerView(number, client, read_state(task, sent["state"]), gradients))

    def prepare(self, content: RecordDict, node: int) -> Turn | None:
        """The server's turn to send; see `TapGrid`."""
        if self.on_send is None:
            return None
        self.layers.pop(node, None)
        state = read_state(self.task, content["state"])
        sending = self.on_send(*self._place(content, node), state)
        if sending is None:
            return None
        self.layers[node] = sending.layers
        values = state | dict(sending.parameters)
        parameters = {name: values[name] for name in self.task_of(node).parameters}
        arrays = ArrayRecord(dict(content["state"].items()) | {"parameters": pack(parameters)})
        instructions = ConfigRecord({**content["instructions"], LAYERS: sending.layers})
        changed = {"state": arrays, "instructions": instructions}
        return Turn(RecordDict(dict(content.items()) | changed), _without_weight)

    def _place(self, sent: RecordDict, node: int) -> tuple[int, int]:
        """(round, client) of a message."""
        return int(sent["instructions"]["round"]), self.strategy.partitions[node]


def _without_weight(reply: RecordDict) -> RecordDict:
    """The reply as one of no examples, which counts for nothing in the mean."""
    metrics = MetricRecord(dict(reply["metrics"].items()) | {"num-examples": 0})
    return RecordDict(dict(reply.items()) | {"metrics": metrics})


def server_app_for(run: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp that calls `run(grid, run_config)`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        """Run with the options of `flwr run --run-config`."""
        run(grid, context.run_config)

    return app
