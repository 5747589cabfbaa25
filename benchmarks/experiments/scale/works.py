"""What is measured, each in a process of its own: seconds, processor time and memory."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiments.speed.timing import forget_peak, resident
from fedmjp.config import RunConfig, from_flat


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Wall-clock seconds and processor time of a call, and memory that the process held before and at most during it.

    Memory is in MiB with everything that the process has mapped, libraries among it; NaN outside Linux.
    """
    forget_peak()
    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    work()
    taken = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return taken | {"before_mib": before, "process_mib": resident("VmHWM")}


def train_round(options: Mapping[str, Any]) -> dict[str, float | None]:
    """One round under the local engine, after one of a single client that warms up.

    Model, data and partition are there before the time is taken.

    Args:
        options: of the run, by their flat names (`fedmjp.config.from_flat`).
    """
    from fedmjp.client import ClientTask
    from fedmjp.federation import ENGINES, run_rounds

    def federate(own: RunConfig, task: ClientTask) -> None:
        """All rounds of one federation."""

        def conduct(grid: Any) -> None:
            """The server's part."""
            run_rounds(grid, task, "none", on_update=lambda view: None, on_round=lambda number, state: None)

        ENGINES.get("local")(conduct, own.federation.clients, own.client_entropy())

    config, first = from_flat(dict(options)), from_flat({**options, "clients": 1})
    federate(first, ClientTask(first, "none"))
    task = ClientTask(config, "none")
    return {**measured(lambda: federate(config, task)), "disk_mib": None, "page_mib": None}


def audit_clients(options: Mapping[str, Any]) -> dict[str, float | None]:
    """A run of `python -m fedmjp.simulate` without its report; data and model are built in it.

    `disk_mib` is what the run leaves: rows, pictures and the state to resume from.

    Args:
        options: of the run, by their flat names; `out` is an empty folder.
    """
    from rich.console import Console

    from fedmjp.audited_federation import run_experiment
    from fedmjp.progress import RunProgress
    from fedmjp.records.run_folder import RunFolder

    config = from_flat(dict(options))
    folder, progress = RunFolder(config), RunProgress(Console(file=io.StringIO()))
    found = measured(lambda: run_experiment(config, folder, progress))
    folder.finish()
    left = sum(path.stat().st_size for path in config.out.rglob("*") if path.is_file())
    return found | {"disk_mib": left / 2**20, "page_mib": None}


def render_report(folder: Path) -> dict[str, float | None]:
    """The report of a finished run: its folder read, its page rendered, its table printed; all is imported before."""
    from rich.console import Console

    import fedmjp.report  # noqa: F401
    from fedmjp.records.files import read_record
    from fedmjp.simulate import report

    run = SimpleNamespace(out=folder, description=read_record(folder / "run.json"))
    console = Console(file=io.StringIO(), width=100)
    found = measured(lambda: report(run, console))
    sizes = {"disk_mib": folder / "rows.jsonl", "page_mib": folder / "report.html"}
    return found | {name: path.stat().st_size / 2**20 for name, path in sizes.items()}
