"""A small federation that trains in a second."""

from __future__ import annotations

import dataclasses

import pytest

from fedmjp.config import RunConfig, from_flat


@pytest.fixture
def small(tmp_path) -> RunConfig:
    """Two rounds of three clients on 32-pixel photographs."""
    options = {
        "model": "vit_mini_32",
        "clients": 3,
        "rounds": 2,
        "attacks": "patch_embedding",
        "audit_clients": "0,1",
        "test_limit": 8,
        "threads": 1,
        "out": str(tmp_path / "run"),
    }
    return from_flat(options)


def changed(config: RunConfig, **options) -> RunConfig:
    """`config` with flat options replaced."""
    return dataclasses.replace(from_flat(options, config))
