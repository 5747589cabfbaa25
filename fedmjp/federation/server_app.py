"""Flower's ServerApp and the loop of rounds of one federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedmjp.client import ClientTask
from fedmjp.federation.client_app import pack_state, read_state
from fedmjp.federation.strategy import FederatedMean
from fedmjp.federation.tap import TapGrid
from fedmjp.federation.wire import flat, layout_of, unpack


@dataclass(frozen=True)
class ServerView:
    """What the server holds of one update.

    Attributes:
        round: counts from 1.
        client: partition id.
        sent: parameters and float buffers by name, as the client was sent them.
        received: what it sent back, by parameter name: gradients or weights.
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
    on_round: Callable[[int, Mapping[str, Tensor]], None],
    first_round: int = 1,
) -> None:
    """Train from the task's model as it stands up to the configured round.

    Args:
        on_update: called with each client's update before it joins the mean.
        on_round: called with (round, state) after each round, and with (first_round - 1, state) before the first.

    Raises:
        ClientFailure: a client failed; names client and round.
    """
    f = task.config.federation
    strategy = FederatedMean(
        order={"config": task.config.to_json(), "defense": defense},
        update=f.update,
        learning_rate=f.learning_rate,
        per_round=task.config.sampled(),
        seed=task.config.seed,
        first_round=first_round,
    )
    layout = layout_of(task.parameters)

    def observe(sent: RecordDict, received: RecordDict, node: int) -> None:
        number = int(sent["order"]["round"])
        gradients = unpack(flat(received["update"]["parameters"]), layout)
        on_update(ServerView(number, strategy.partitions[node], read_state(task, sent["state"]), gradients))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        on_round(server_round + first_round - 1, read_state(task, arrays))
        return None

    strategy.start(
        TapGrid(grid, observe), pack_state(task), num_rounds=f.rounds - first_round + 1, evaluate_fn=evaluate
    )


def server_app_for(conduct: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp whose whole work is `conduct(grid, run_config)`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        conduct(grid, context.run_config)

    return app
