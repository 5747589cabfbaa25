"""A killed command resumes to the results of an unbroken one: a sample of what `make crash` does.

One operation of each kind (opening a file to write, renaming, removing, making folders, low-level writes and flushes)
of each command; `make crash` kills at every operation.
"""

from __future__ import annotations

import os

import pytest

from tests import crash

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.mark.parametrize(
    "name", ["simulate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train", "april_attack"))]
)
def test_a_killed_command_resumes(name: str, tmp_path) -> None:
    assert crash.check_kinds(name, tmp_path) == ""
