"""failures.jsonl: one row for each client's update that is missing from a round or from the audit, with the reason.

They are no rows of rows.jsonl, which are images. The file is there from the first failure on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedmjp import __version__
from fedmjp.records import provenance
from fedmjp.records.rows import RowLog, Schema, load_rows, replace_rows

FILE = "failures.jsonl"
LEFT_OUT = "left out"  # the update is in no mean and was not attacked
NOT_AUDITED = "not audited"  # a user's own app has taken the update; the Watcher could not read or attack it
FAILURES = Schema(
    ("run_id", "commit", "version", "defense", "round", "client", "status", "reason"),
    ("run_id", "defense", "round", "client"),
)


class FailureLog:
    """The failures of the run `run_id` in its folder; see `RowLog`.

    Args:
        out: the run's folder.
        run_id: of the run.
    """

    def __init__(self, out: Path, run_id: str) -> None:
        self._path, self._run_id = out / FILE, run_id
        self._log: RowLog | None = None

    def note(self, defense: str, round: int, client: int, status: str, reason: str) -> None:
        """Append a row; the first reason stands.

        Args:
            client: or a node's id, in a user's own app.
            status: LEFT_OUT or NOT_AUDITED.
            reason: the end of a sentence about the client for LEFT_OUT, else a sentence.

        Raises:
            UsageError: the file is damaged.
            OSError: there is no room for the row.
        """
        self._log = self._log or RowLog(self._path, FAILURES)
        row = {"run_id": self._run_id, "commit": provenance.commit(), "version": __version__, "defense": defense}
        row |= {"round": round, "client": client, "status": status, "reason": reason}
        if not self._log.has(row):
            self._log.append(row)
            self._log.sync()

    def forget(self, defense: str, after: int) -> None:
        """Drop the failures of the rounds above `after`, which will be run again."""
        rows = load_failures(self._path.parent)
        kept = [row for row in rows if row["defense"] != defense or row["round"] <= after]
        if len(kept) == len(rows):
            return
        self.close()
        replace_rows(self._path, kept)

    def close(self) -> None:
        """Close the file; `note` opens it again."""
        if self._log is not None:
            self._log.close()
            self._log = None


def load_failures(out: Path) -> list[dict[str, Any]]:
    """The rows of a folder's failures.jsonl in their order; none where there is no file.

    Raises:
        UsageError: a line is damaged.
    """
    path = out / FILE
    return load_rows(path, FAILURES).to_dict("records") if path.exists() else []
