"""Federations as parts of a table: each in a folder of its own (`run_or_resume`), their rows gathered."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path

from fedmjp.records.rows import join_rows


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
