"""python -m fedmjp.simulate: train a federation of ViTs, attack its updates, write the report.

Also the ServerApp of `flwr run`: the same run on a SuperLink with SuperNodes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from fedmjp.audited_federation import check_before_start, conduct_on, run_experiment
from fedmjp.cli import EXIT_FAILURE, guarded, parse, terminal
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation import ClientFailure, server_app_for
from fedmjp.progress import RunProgress
from fedmjp.records.rows import load_rows
from fedmjp.records.run_folder import RunFolder
from fedmjp.report import as_text, read_panels, render, summarise


def run(config: RunConfig, console: Console) -> Path:
    """Run `config` and render its report; the path of report.html.

    Raises:
        UsageError, ClientFailure: see `run_experiment`.
    """
    check_before_start(config)
    folder = RunFolder(config)
    if not folder.is_finished():
        run_experiment(config, folder, RunProgress(console))
        folder.finish()
    return report(folder, console)


def report(folder: RunFolder, console: Console) -> Path:
    """Render a finished run and print its leakage table; the path of report.html."""
    rows = load_rows(folder.out / "rows.jsonl")
    page = render(folder.out, read_panels(folder.out, rows))
    console.print(as_text(summarise(rows), width=max(console.width, 100)))
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 for a failed client, 2 for a mistake of usage, 130 for an interrupt."""
    config = parse(RunConfig, "python -m fedmjp.simulate", RunConfig.__doc__, arguments)
    if config.out == RunConfig().out:
        config = dataclasses.replace(config, out=config.out / datetime.now().strftime("%Y%m%d-%H%M%S"))
    console, hint = terminal(), f"finished rows are in {config.out}; go on with --resume --out {config.out}"

    def work() -> None:
        console.print(f"report: {run(config, console)}", soft_wrap=True, highlight=False)

    try:
        return guarded(work, lambda: hint)
    except ClientFailure as error:
        print(f"error: {error}\n{hint}", file=sys.stderr)
        return EXIT_FAILURE


def _flower_main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """The run on Flower's grid, with options from `flwr run --run-config`."""
    config = from_flat(dict(run_config))
    clients = len(list(grid.get_node_ids()))
    config = dataclasses.replace(config, federation=dataclasses.replace(config.federation, clients=clients))
    check_before_start(config)
    folder, console = RunFolder(config), terminal()
    conduct_on(grid, config, folder, RunProgress(console))
    folder.finish()
    console.print(f"report: {report(folder, console)}")


server_app = server_app_for(_flower_main)

if __name__ == "__main__":
    sys.exit(main())
