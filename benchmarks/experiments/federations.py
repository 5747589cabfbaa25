"""Federations as parts of a table: folders beside each other, of the same pictures, whose rows are gathered."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from fedmjp.audited_federation import run_or_resume
from fedmjp.config import RunConfig
from fedmjp.records.files import read_sealed, write_sealed
from fedmjp.records.image_digests import FILE, ImageDigests
from fedmjp.records.rows import join_rows
from fedmjp.records.run_folder import RunFolder, holds_finished


def run_federation(
    config: RunConfig, title: str, console: Console, measure: Callable[[RunConfig, RunFolder], None] | None = None
) -> None:
    """`run_or_resume` on the pictures that the federations in the folders beside `config.out` have attacked.

    Raises:
        UsageError, ClientFailure, Incomplete: see `run_or_resume`; pictures that are others than before.
    """
    if not holds_finished(config):
        config.out.mkdir(parents=True, exist_ok=True)
        digests = ImageDigests(config.out, config.data.data)
        for other in sorted(config.out.parent.glob(f"*/{FILE}")):
            digests.adopt(other.parent)
    run_or_resume(config, title, console, measure)


def write_measured(table: pd.DataFrame, path: Path) -> None:
    """Write what was measured of a federation beside its rows into its folder, sealed."""
    write_sealed(path, table.to_csv(index=False).encode())


def read_measured(path: Path) -> pd.DataFrame | None:
    """What `write_measured` wrote; None where it was not measured.

    Raises:
        UsageError: the file is not as it was written.
    """
    if not path.exists():
        return None
    content, _ = read_sealed(path, f"delete the folder {path.parent} and pass --resume")
    return pd.read_csv(io.BytesIO(content))


def gather_rows(folders: Sequence[Path], out: Path) -> None:
    """Write the rows of finished federations into one packed log in `out`."""
    join_rows([folder / "rows.jsonl" for folder in folders], out / "rows.jsonl")


def reasons_not_run(folders: Sequence[Path], ran: Container[str]) -> dict[str, str]:
    """Why the suites of the federations left attacks out, for those that `ran` in none of them."""
    found: dict[str, str] = {}
    for folder in folders:
        for reasons in json.loads((folder / "run.json").read_text(encoding="utf-8"))["not_run"].values():
            found |= {name: f"not run: {reason}" for name, reason in reasons.items() if name not in ran}
    return found
