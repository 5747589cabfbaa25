"""Tasks on a Ray cluster (https://docs.ray.io, the extra `ray`).

Each task is a Ray task of one CPU. The work (model, images or where they are, attack) is put into Ray's store once and
read once by each process; a process that dies is retried here (`fedmjp.workers.schedule`), not by Ray, so that
the same task is given up under both executors. Every node must have this very code and these versions of the packages,
and what a path names must be there on every node.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from attacks.registry import UsageError
from fedmjp.workers.options import WorkerConfig
from fedmjp.workers.schedule import Died, Lost, Raised, attempt

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use over the network unless it is asked not to
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without a GPU leave its variables alone

import ray
from ray import cloudpickle

PACKAGES = ("torch", "numpy", "timm")  # whose versions decide about numbers


class RayTasks:
    """See `fedmjp.workers.schedule.Executor`.

    Args:
        tasks: what is computed; each travels to a node.
        work: called with a task, on a node.
        config: address, and most tasks at a time.

    Raises:
        UsageError: no cluster at the address, or work that cannot be sent.
    """

    def __init__(self, tasks: Sequence[Any], work: Callable[[Any], Any], config: WorkerConfig) -> None:
        connect(config)
        self.tasks = tasks
        self.capacity = config.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        try:
            self._work = ray.put(work)
        except TypeError as error:
            raise UsageError(f"--ray cannot send this work to other machines: {str(error).splitlines()[0]}") from error
        self._running: dict[ray.ObjectRef, int] = {}

    def submit(self, number: int) -> None:
        """Hand a task to the cluster, which begins it once a CPU is free."""
        task = cloudpickle.dumps(self.tasks[number])
        self._running[_compute.remote([self._work], task, code(), sys.path)] = number

    def wait(self) -> list[tuple[int, Any]]:
        """See `Executor.wait`."""
        ready, _ = ray.wait(list(self._running), num_returns=1)
        return [(self._running.pop(reference), _outcome(reference)) for reference in ready]

    def close(self) -> None:
        """End all tasks; the connection stays for the next call."""
        for reference in self._running:
            ray.cancel(reference, force=True)
        self._running.clear()


def connect(config: WorkerConfig) -> None:
    """Connect this process to the cluster, once.

    Raises:
        UsageError: nothing answers there.
    """
    if ray.is_initialized():
        return
    _require_answer(config.ray)
    own = {"num_cpus": config.workers, "include_dashboard": False} if config.ray == "local" else {}
    try:
        ray.init(config.ray, logging_level="ERROR", log_to_driver=False, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--ray {config.ray}: no Ray cluster answers there ({line[:120]})") from error


def _require_answer(address: str) -> None:
    """Refuse an address at which nothing listens; Ray itself would try for minutes.

    Raises:
        UsageError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # auto or local
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise UsageError(f"--ray {address}: nothing answers there ({error})") from error


def _outcome(reference: Any) -> Any:
    """What a task returned; what its process raised or how it died where it returned nothing."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # outside the work: reading its arguments, sending its result
        return Lost(f"Ray: {str(error.cause or error).splitlines()[-1]}", str(error))
    except ray.exceptions.RayError as error:
        return Died(f"ended with {type(error).__name__}")


@ray.remote(num_cpus=1, max_retries=0)
def _compute(work: list[Any], task: bytes, wanted: dict[str, str], paths: Sequence[str]) -> Any:
    """One task, on a node.

    Args:
        work: the reference to the work, in a list because Ray would read a bare one anew for every task.
        task: pickled.
        wanted: `code` of the machine that asks.
        paths: where that machine looks for modules; those that this node has, too, are searched last.
    """
    differing = {name: value for name, value in code().items() if value != wanted[name]}
    if differing:
        name, value = next(iter(differing.items()))
        return Raised(
            UsageError(f"--ray: node {platform.node()} has {name} {value}, and this machine has {wanted[name]}")
        )
    import torch

    from attacks.arithmetic import use_exact_arithmetic

    torch.set_num_threads(1)
    use_exact_arithmetic()
    sys.path += [path for path in paths if path not in sys.path]
    try:
        function, own = _read(work[0]), cloudpickle.loads(task)
    except ModuleNotFoundError as error:
        return Raised(UsageError(f"--ray: node {platform.node()} has no module {error.name}; install it there"))
    return attempt(function, own)


@lru_cache(maxsize=1)
def _read(reference: Any) -> Callable[[Any], Any]:
    """The work behind a reference, which this process keeps for its next tasks."""
    return ray.get(reference)


@lru_cache
def code() -> dict[str, str]:
    """What must be the same on all nodes: Python, packages, and a digest of this project's code and weights."""
    from importlib.metadata import version

    from fedmjp.records.provenance import source

    versions = {name: version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **versions, "the code": source()}
