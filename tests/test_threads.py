"""Threads: as many as find free cores, unless their number was asked for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fedmjp import devices
from fedmjp.devices import LARGEST_SLOWDOWN, slowdown, use_threads


@pytest.mark.parametrize(("busy", "left"), [((), 8), ((8,), 4), ((8, 4, 2), 1)])
def test_threads_are_those_that_find_free_cores(monkeypatch, busy: tuple[int, ...], left: int) -> None:
    monkeypatch.setattr(devices, "slowdown", lambda: 400.0 if torch.get_num_threads() in busy else 1.0)
    torch.set_num_threads(8)
    expected = pytest.warns(UserWarning, match=f"computing with {left} of 8 threads") if busy else nullcontext()
    with expected:
        use_threads(0)
    assert torch.get_num_threads() == left


def test_threads_that_were_asked_for_are_taken(monkeypatch) -> None:
    monkeypatch.setattr(devices, "slowdown", lambda: 400.0)
    use_threads(3)
    assert torch.get_num_threads() == 3


def test_the_slowdown_is_of_the_threads_in_use_and_leaves_them() -> None:
    torch.set_num_threads(1)
    assert 0.1 < slowdown() < LARGEST_SLOWDOWN  # one thread against one
    torch.set_num_threads(2)
    assert slowdown() > 0
    assert torch.get_num_threads() == 2
