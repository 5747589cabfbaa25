"""run.json: what a command was asked, and with which versions, commits and machines its results were made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedmjp.records import provenance
from fedmjp.records.files import read_record, write_record


def note_run(
    out: Path,
    program: str,
    *,
    devices: Iterable[str],
    commits: Iterable[str] | None = None,
    overwritten: bool = False,
    joined: Mapping[str, Iterable[str]] | None = None,
    **more: Any,
) -> None:
    """Write or bring up to date `out`/run.json; commands, commits and devices of earlier calls are kept.

    Args:
        program: the command without its options.
        devices: in words, as `provenance.device_name` gives them.
        commits: behind the results; None for the present one.
        overwritten: this call replaced the results of earlier ones, which are forgotten.
        joined: further lists that keep what earlier calls wrote.
        more: further entries, which replace those of earlier calls.
    """
    file = out / "run.json"
    before = read_record(file) if file.exists() and not overwritten else {}
    commits = [provenance.commit()] if commits is None else commits
    lists = {**(joined or {}), "commits": commits, "devices": devices}
    record = {
        **before,
        "commands": [*before.get("commands", []), provenance.command(program)],
        **more,
        "versions": provenance.versions(),
        **{name: sorted({*before.get(name, []), *values}) for name, values in lists.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    write_record(file, record)


def note_start(out: Path) -> None:
    """Write `out`/run.json before the first row, or mark it as unfinished: no row is there without it."""
    file = out / "run.json"
    before = read_record(file) if file.exists() else {}
    out.mkdir(parents=True, exist_ok=True)
    write_record(file, before | {"finished": False})


def note_rows(out: Path, program: str, rows: pd.DataFrame, finished: bool = True, **more: Any) -> None:
    """`note_run` with what the rows say of themselves.

    Args:
        rows: all rows of the folder, with the columns commit, device, model and weights.
        finished: whether they are all rows that were asked for.
    """
    weights = sorted(set(zip(rows["model"], rows["weights"], strict=True)))
    own = {
        "commits": rows["commit"],
        "devices": rows["device"],
        "weights": weights,
        "rows": len(rows),
        "finished": finished,
    }
    note_run(out, program, **more, **own)
