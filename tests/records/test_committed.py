"""The committed results are as they were written, so that anyone can go on with `--resume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmjp.records.files import read_record

RECORDS = sorted(Path(__file__).parents[2].glob("results/**/run.json"))


@pytest.mark.parametrize("path", RECORDS, ids=[str(path.parent.name) for path in RECORDS])
def test_the_record_of_a_committed_run_is_whole(path: Path) -> None:
    assert read_record(path).get("finished", True)
