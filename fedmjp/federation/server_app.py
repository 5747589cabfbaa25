"""Flower's ServerApp, and the training rounds of one federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedmjp.client import ClientTask
from fedmjp.federation.boundary import CheckedGrid, Expected
from fedmjp.federation.client_app import pack_state, read_kept, read_state
from fedmjp.federation.server_optimizer import ServerOptimizer
from fedmjp.federation.strategy import FederatedMean
from fedmjp.federation.tap import TapGrid
from fedmjp.federation.wire import KEPT, flat, layout_of, pack, unpack
from fedmjp.records.server_state import ServerState


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
        first_round: number of the first round, above 1 if a run is resumed.
        optimizer: moments of the server's optimiser after the round before the first (`ServerState.optimizer`).

    Raises:
        ClientFailure: more clients failed than `--least-share` allows; the message names client and round.
    """
    f, state = task.config.federation, pack_state(task)

    def keep(sent: ArrayRecord, arrays: ArrayRecord, number: int) -> Array:
        return pack(task.keep(read_state(task, arrays), read_kept(task, sent), number))

    server = ServerOptimizer(f.chosen_strategy(), dict(optimizer or {}))
    strategy = FederatedMean(
        instructions={"config": task.config.to_json(), "defense": defense},
        update=f.update,
        learning_rate=f.learning_rate,
        per_round=task.config.sampled(),
        seed=task.config.seed,
        optimizer=server,
        clients=f.clients,
        least_share=f.least_share,
        on_failure=on_failure,
        first_round=first_round,
        keep=keep if KEPT in state else None,
    )
    layout = layout_of(task.parameters)

    def observe(sent: RecordDict, received: RecordDict, node: int) -> None:
        number = int(sent["instructions"]["round"])
        gradients = unpack(flat(received["update"]["parameters"]), layout)
        on_update(ServerView(number, strategy.partitions[node], read_state(task, sent["state"]), gradients))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        state = ServerState(read_state(task, arrays), read_kept(task, arrays) or {}, server.state())
        on_round(server_round + first_round - 1, state)
        return None

    def examples(node: int) -> int:
        return f.batch_size * task.steps(strategy.partitions[node])

    checked = CheckedGrid(grid, Expected.of(layout, layout_of(task.buffers), examples))
    strategy.start(TapGrid(checked, observe), state, num_rounds=f.rounds - first_round + 1, evaluate_fn=evaluate)


def server_app_for(run: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp that calls `run(grid, run_config)`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context.run_config)

    return app
