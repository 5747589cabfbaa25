"""What may be resumed: the same options, at any depth, at the same commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import UsageError
from fedmjp.records import provenance

OPTIONS = {"seed": 0, "defenses": {"weak": {"gamma": 0.1}, "strong": {"gamma": 0.9}}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"seed": 1, "defenses": OPTIONS["defenses"]}, "another seed"),
        ({"seed": 0, "defenses": {"weak": {"gamma": 0.2}, "strong": {"gamma": 0.9}}}, "another gamma"),
        ({"seed": 0, "defenses": {"new": {"gamma": 0.1}}}, "another gamma"),
    ],
)
def test_other_options_are_refused(now: dict, said: str) -> None:
    before = {"config": OPTIONS, "commit": provenance.commit()}
    provenance.require_same(Path("out"), "run", before, OPTIONS)
    with pytest.raises(UsageError, match=f"out holds a run with {said}; resume with the same options"):
        provenance.require_same(Path("out"), "run", before, now)


def test_another_commit_is_refused() -> None:
    with pytest.raises(UsageError, match="out was begun at commit abc1234"):
        provenance.require_same(Path("out"), "run", {"config": OPTIONS, "commit": "abc1234"}, OPTIONS)
