"""failures.jsonl: a row for each update that is missing, once, and none of rounds that are run again."""

from __future__ import annotations

import pytest

from attacks import UsageError
from fedmjp.records.failures import FILE, LEFT_OUT, FailureLog, load_failures


def noted(out, *failures: tuple[str, int, int], reason: str = "sent no reply") -> FailureLog:
    """The log after these failures of (defence, round, client)."""
    log = FailureLog(out, "run")
    for defense, number, client in failures:
        log.note(defense, number, client, LEFT_OUT, reason)
    return log


def places(out) -> list[tuple[str, int, int]]:
    return [(row["defense"], row["round"], row["client"]) for row in load_failures(out)]


def test_no_file_without_failures(tmp_path) -> None:
    noted(tmp_path).forget("none", 0)
    assert load_failures(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_notes_none_twice_and_forgets_rounds_that_it_repeats(tmp_path) -> None:
    first = [("none", 1, 3), ("none", 2, 0), ("mjp", 2, 0)]
    noted(tmp_path, *first, first[0]).close()
    assert places(tmp_path) == first
    again = noted(tmp_path, first[0], reason="failed")
    assert [row["reason"] for row in load_failures(tmp_path)] == ["sent no reply"] * 3
    again.forget("none", after=1)
    assert places(tmp_path) == [first[0], first[2]]
    again.note("none", 2, 1, LEFT_OUT, "failed")
    assert places(tmp_path) == [first[0], first[2], ("none", 2, 1)]


def test_a_changed_row_is_refused(tmp_path) -> None:
    noted(tmp_path, ("none", 1, 3), ("none", 2, 3)).close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 7'))
    with pytest.raises(UsageError, match=r"failures.jsonl, line 1: not as it was written"):
        load_failures(tmp_path)
