"""python -m fedmjp.simulate: train a federation of ViTs, attack its updates, write the report.

Also the ServerApp of `flwr run`: the same run on a SuperLink with SuperNodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from attacks import UsageError
from fedmjp.config import RunConfig, from_flat
from fedmjp.experiment import check_before_start, conduct_on, run_experiment
from fedmjp.federation import ClientFailure, server_app_for
from fedmjp.progress import RunProgress
from fedmjp.report import as_text, load_rows, render, summarise
from fedmjp.workspace import Workspace

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run(config: RunConfig, console: Console) -> Path:
    """Run `config` and render its report; the path of report.html.

    Raises:
        UsageError, ClientFailure: see `run_experiment`.
    """
    check_before_start(config)
    workspace = Workspace(config)
    if not workspace.is_finished():
        run_experiment(config, workspace, RunProgress(console))
        workspace.finish()
    return report(workspace, console)


def report(workspace: Workspace, console: Console) -> Path:
    """Render a finished run and print its leakage table; the path of report.html."""
    page = render(workspace.out, workspace.panels())
    summary = summarise(load_rows(workspace.out / "rows.jsonl"))
    console.print(as_text(summary, width=max(console.width, 100)))
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 for a failed client, 2 for a mistake of usage, 130 for an interrupt."""
    console = _console()
    config = _parse(arguments)
    if config.out == RunConfig().out:
        config = dataclasses.replace(config, out=config.out / datetime.now().strftime("%Y%m%d-%H%M%S"))
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        page = run(config, console)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ClientFailure as error:
        print(
            f"error: {error}\nFinished rows are in {config.out}; go on with --resume --out {config.out}",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; finished rows are in {config.out}; go on with --resume --out {config.out}", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    console.print(f"report: {page}", soft_wrap=True, highlight=False)
    return 0


def _parse(arguments: Sequence[str] | None) -> RunConfig:
    """The configuration on the command line; leaves with code 2 and one line where it cannot be read."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                tyro.conf.configure(tyro.conf.OmitArgPrefixes)(RunConfig),
                prog="python -m fedmjp.simulate",
                description=RunConfig.__doc__,
                args=arguments,
            )
    except SystemExit as stop:
        if stop.code:  # the parser draws a box around several lines
            words = re.sub(r"[^\S ]|[\u2500-\u257f]", " ", complaint.getvalue())
            print("error: " + re.sub(r" +", " ", words).strip(), file=sys.stderr)
        raise


def _console() -> Console:
    """The terminal; a file or a pipe is given room for the table."""
    return Console() if sys.stdout.isatty() else Console(width=130)


def _flower_main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """The run on Flower's grid, with options from `flwr run --run-config`."""
    config = from_flat(dict(run_config))
    clients = len(list(grid.get_node_ids()))
    config = dataclasses.replace(config, federation=dataclasses.replace(config.federation, clients=clients))
    check_before_start(config)
    workspace, console = Workspace(config), _console()
    conduct_on(grid, config, workspace, RunProgress(console))
    workspace.finish()
    console.print(f"report: {report(workspace, console)}")


server_app = server_app_for(_flower_main)

if __name__ == "__main__":
    sys.exit(main())
