"""A killed command resumes to the results of an unbroken one, whichever of its file operations it is killed at.

From copies of the folder before each operation, which are what a killed process leaves; two processes are killed in
earnest. `make crash ARGS=--kill` kills one at every operation.
"""

from __future__ import annotations

import os

import pytest

from tests import crash

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


COMMANDS = ("simulate", "train", "april_attack")


@pytest.mark.parametrize("name", ["simulate", "train", pytest.param("april_attack", marks=pytest.mark.long)])
def test_a_command_resumes_from_states_of_its_folder(name: str, tmp_path) -> None:
    """Eight of them, spread evenly."""
    assert crash.check(name, tmp_path, points=8) == []


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_resumes_from_every_state_of_its_folder(name: str, tmp_path) -> None:
    assert crash.check(name, tmp_path) == []


def test_a_killed_command_resumes(tmp_path) -> None:
    assert crash.check("train", tmp_path, points=2, kill=True) == []
