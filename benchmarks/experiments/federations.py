"""Federations as parts of a table: each in a folder of its own, taken up where it stopped, their rows gathered."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from rich.console import Console

from fedmjp.audited_federation import run_experiment
from fedmjp.config import RunConfig
from fedmjp.progress import RunProgress
from fedmjp.records.rows import pack_rows
from fedmjp.records.run_folder import RunFolder, holds_finished


def train(
    config: RunConfig, title: str, console: Console, measure: Callable[[RunConfig, RunFolder], None] | None = None
) -> None:
    """Run or take up one federation in `config.out`, unless it is finished.

    Args:
        measure: called with the trained federation while its last state is still in its folder.

    Raises:
        UsageError, ClientFailure: see `run_experiment`.
    """
    if holds_finished(config):
        console.print(f"{title}: finished before", highlight=False)
        return
    console.print(title, style="bold", highlight=False)
    folder = RunFolder(config)
    run_experiment(config, folder, RunProgress(console))
    if measure is not None:
        measure(config, folder)
    folder.finish()


def gather_rows(folders: Sequence[Path], out: Path) -> None:
    """Write the rows of finished federations into one packed log in `out`."""
    with (out / "rows.jsonl").open("wb") as file:
        for folder in folders:
            file.write((folder / "rows.jsonl").read_bytes())
    pack_rows(out / "rows.jsonl")


def reasons_not_run(folders: Sequence[Path], ran: Container[str]) -> dict[str, str]:
    """Why the suites of the federations left attacks out, for those that `ran` in none of them."""
    found: dict[str, str] = {}
    for folder in folders:
        for reasons in json.loads((folder / "run.json").read_text(encoding="utf-8"))["not_run"].values():
            found |= {name: f"not run: {reason}" for name, reason in reasons.items() if name not in ran}
    return found
