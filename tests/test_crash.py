"""A killed command resumes to the results of an unbroken one, whichever of its file operations it is killed at.

From copies of the folder before each operation, which are what a killed process leaves, of simulate and april_attack
from every second one that differs; two processes are killed in earnest. `make crash` resumes from every copy, and with
ARGS=--kill it kills a process at every operation.
"""

from __future__ import annotations

import os

import pytest

from tests import crash

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "points"), [("simulate", 30), ("train", 0), ("april_attack", 20)])
def test_a_command_resumes_from_the_states_of_its_folder(name: str, points: int, tmp_path) -> None:
    assert crash.check(name, tmp_path, points) == []


def test_a_killed_command_resumes(tmp_path) -> None:
    assert crash.check("train", tmp_path, points=2, kill=True) == []
