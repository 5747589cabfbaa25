"""All submissions of a folder, read and checked, and as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from attacks import UsageError
from fedmjp.leaderboard import schema
from fedmjp.leaderboard.tiers import tier_called


def submissions(results: Path) -> list[dict[str, Any]]:
    """Every submission in a folder, no defence first, then by file name.

    Raises:
        UsageError: none there, or a damaged file.
    """
    files = sorted(path for path in results.glob("*.json") if path.name != "run.json")
    if not files:
        raise UsageError(f"no submission in {results}; run fedmjp-leaderboard add none first")
    found = [schema.read(path) | {"file": path.name} for path in files]
    return sorted(found, key=lambda document: document["entry"] != "none")


def tier_title(name: str) -> str:
    """A tier's name in words."""
    return tier_called(name).title


def worst_words(document: Mapping[str, Any]) -> str:
    """Where the worst case of a submission is: tier and model."""
    worst = document["worst"]
    return f"{tier_title(worst['tier'])}, {worst['model']}"


def rerun_words(found: Sequence[Mapping[str, Any]]) -> str:
    """How many submissions say that a part of them was run again (`fedmjp-leaderboard verify --record`)."""
    again = sum(document["rerun"] is not None for document in found)
    whose = f"each of the {again}" if again == len(found) else f"{again} of the {len(found)}"
    return (
        f"A random tenth of the attacked updates of {whose} submissions was run again here, with the same metrics "
        "within the tolerances of `fedmjp-leaderboard verify`; their cards name the commit and count the rows "
        "that rounding alone changes, as searches that have not converged leave them."
    )


def listing(results: Path) -> Table:
    """The submissions as a table for a terminal.

    Raises:
        UsageError: see `submissions`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in ("file", "track", "worst case", "strongest attack", "answer", "attacks that know it"):
        table.add_column(head, overflow="fold")
    for document in submissions(results):
        worst, track = document["worst"], document["track"] + ("" if document["comparable"] else " (not comparable)")
        figure = "no image" if worst["psnr_median"] is None else f"{worst['psnr_median']:.1f} dB"
        figures = f"{worst['attack']} {figure}" if worst["attack"] else "none"
        table.add_row(
            document["file"], track, worst_words(document), figures, worst["answer"], document["adaptive"] or "–"
        )
    return table
