"""A small federation that trains in a second, and a reply as its server expects it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation.boundary import Expected
from fedmjp.federation.wire import layout_of, pack


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


@pytest.fixture(scope="module")
def good() -> tuple[Expected, RecordDict]:
    """What a small model's reply must hold, and a reply that holds it."""
    tensors = {"w": torch.randn(30, 40, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(40)}
    buffers = {"mean": torch.zeros(5)}
    expected = Expected.of(layout_of(tensors), layout_of(buffers), lambda node: 8)
    update = {"parameters": pack(tensors), "buffers": pack(buffers)}
    metrics = MetricRecord({"num-examples": 8, "train-loss": 1.5})
    return expected, RecordDict({"update": ArrayRecord(update), "metrics": metrics})


def changed(config: RunConfig, **options) -> RunConfig:
    """`config` with flat options replaced."""
    return dataclasses.replace(from_flat(options, config))


def stop_in_round(number: int, patch: pytest.MonkeyPatch) -> None:
    """Interrupt a run while client 1 trains in a round, when client 0 has had its turn."""
    honest = ClientTask.update

    def update(self, client, round, *state):
        if (client, round) == (1, number):
            raise KeyboardInterrupt
        return honest(self, client, round, *state)

    patch.setattr(ClientTask, "update", update)
