"""Where the clients run: in this process, or in Flower's Ray simulation. The apps are the same."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from flwr.serverapp import Grid

from attacks.registry import Registry, UsageError
from fedmjp.federation.client_app import app as client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.federation.server_app import server_app_for

Conduct = Callable[[Grid], None]
ENGINES: Registry[Callable[[Conduct, int], None]] = Registry("engine")

# Flower logs every round at INFO; the run's own progress says it better.
logging.getLogger("flwr").setLevel(logging.ERROR)


@ENGINES.register("local")
def run_local(conduct: Conduct, clients: int) -> None:
    """Run `conduct` over an in-process grid of `clients` nodes."""
    conduct(LocalGrid(client_app, clients))


@ENGINES.register("ray")
def run_ray(conduct: Conduct, clients: int) -> None:
    """Run `conduct` as the ServerApp of Flower's simulation, one CPU a client.

    Raises:
        UsageError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--engine ray needs Ray: pip install 'fedmjp[ray]', or use --engine local")
    from flwr.simulation import run_simulation

    failures: list[BaseException] = []

    def main(grid: Grid, _: object) -> None:
        try:
            conduct(grid)
        except BaseException as error:  # Flower would wrap or swallow it; the caller gets it as it was raised
            failures.append(error)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"logging_level": "ERROR"}}
    run_simulation(server_app_for(main), client_app, num_supernodes=clients, backend_config=backend)
    if failures:
        raise failures[0]
