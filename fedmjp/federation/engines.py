"""Engines, which run the clients: in this process, or in Flower's Ray simulation. Both use the same apps."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from flwr.serverapp import Grid

from attacks.registry import Registry, UsageError
from fedmjp.entropy import ClientEntropy
from fedmjp.federation.client_app import build_client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.server_app import server_app_for
from fedmjp.records.client_states import ClientStates

GridFunction = Callable[[Grid], None]
Engine = Callable[[GridFunction, int, ClientEntropy, ClientStates | None], None]  # as `run_local`
ENGINES: Registry[Engine] = Registry("engine")

# Flower logs every round at INFO, which would duplicate the run's own progress display.
logging.getLogger("flwr").setLevel(logging.ERROR)


@ENGINES.register("local")
def run_local(run: GridFunction, clients: int, entropy: ClientEntropy, states: ClientStates | None = None) -> None:
    """Call `run` with an in-process grid of `clients` nodes, whose `entropy` and `states` are `build_client_app`'s."""
    run(LocalGrid(build_client_app(entropy, states), clients))


@ENGINES.register("ray")
def run_ray(run: GridFunction, clients: int, entropy: ClientEntropy, states: ClientStates | None = None) -> None:
    """Call `run` as the ServerApp of Flower's simulation with `clients` nodes, one CPU per client; see `run_local`.

    Raises:
        UsageError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray: pip install 'fedmjp[ray]', or use --engine local")
    from flwr.simulation import run_simulation

    failures: list[BaseException] = []

    def main(grid: Grid, _: object) -> None:
        """Run, and keep what is raised."""
        try:
            run(grid)
        except BaseException as error:  # Flower would wrap or drop it; the caller gets the original exception
            failures.append(error)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"logging_level": "ERROR"}}
    app = build_client_app(entropy, states)
    run_simulation(server_app_for(main), app, num_supernodes=clients, backend_config=backend)
    if failures:
        raise failures[0]
