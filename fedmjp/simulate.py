"""python -m fedmjp.simulate: train a federation of ViTs, attack its updates, write the report.

What computes is imported after the options are read and checked, so that help and mistakes are answered at once.
`fedmjp.flower_app` is the same run on a SuperLink with SuperNodes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedmjp.cli import guarded, parse, terminal
from fedmjp.config import RunConfig
from fedmjp.defenses.options import require_used

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.records.run_folder import RunFolder


def run(config: RunConfig, console: Console) -> Path:
    """Run `config` and render its report; the path of report.html.

    Raises:
        UsageError, ClientFailure: see `run_experiment`.
        Incomplete: attacks were given up; the report is written.
    """
    require_used(config.options, config.defense)
    config.validate()
    from fedmjp.audited_federation import run_experiment
    from fedmjp.before_start import check_before_start
    from fedmjp.progress import RunProgress
    from fedmjp.records.run_folder import RunFolder

    for guarantee in check_before_start(config):
        console.print(guarantee, highlight=False, soft_wrap=True)
    folder = RunFolder(config)
    if not folder.is_finished():
        run_experiment(config, folder, RunProgress(console))
        folder.finish()
    page = report(folder, console)
    if folder.description["not_attacked"]:
        console.print(f"report: {page}", soft_wrap=True, highlight=False)
    folder.require_attacked()
    return page


def report(folder: RunFolder, console: Console) -> Path:
    """Render a finished run and print its verdicts, its table and what was not tested; the path of report.html."""
    from fedmjp.records.failures import load_failures
    from fedmjp.report import (
        as_headlines,
        as_terminal_lines,
        as_text,
        read_panels,
        read_rows,
        render,
        summarise,
        verdicts,
    )

    rows = read_rows(folder.out)
    page = render(folder.out, read_panels(folder.out, rows), rows)
    found = verdicts(rows, folder.description)
    for line in as_headlines(found):
        console.print(line)
    console.print(as_text(summarise(rows), width=max(console.width, 100)))
    for line in as_terminal_lines(rows, found, folder.description, load_failures(folder.out)):
        console.print(line)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 for a failed client or attacks that were given up, 2 for a mistake of
    usage, 130 for an interrupt."""
    config = parse(RunConfig, "python -m fedmjp.simulate", RunConfig.__doc__, arguments)
    if config.out == RunConfig().out:
        config = dataclasses.replace(config, out=config.out / datetime.now().strftime("%Y%m%d-%H%M%S"))
    console = terminal()

    def work() -> None:
        """The run, from checked options to the path of its report."""
        console.print(f"report: {run(config, console)}", soft_wrap=True, highlight=False)

    return guarded(work, lambda: f"finished rows are in {config.out}; go on with --resume --out {config.out}")


if __name__ == "__main__":
    sys.exit(main())
