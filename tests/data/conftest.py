"""Fixtures of the data tests."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def shared():
    """Return a function: folder name -> path of development data, skipping the test where it is absent."""

    def find(name):
        if not (SHARED / name).is_dir():
            pytest.skip(f"development data ../shared/data/{name} is not on this machine")
        return SHARED / name

    return find
