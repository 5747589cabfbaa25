"""Serialised tensors: exact, in order, readable by Flower itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array

from fedmjp.federation.wire import all_finite, flat, layout_of, pack, unpack


def test_round_trip_and_flowers_own_reader() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(()), "c": torch.randn(2, 1, 5).transpose(0, 2)}
    array = pack(tensors)
    back = unpack(flat(array), layout_of(tensors))
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    np.testing.assert_array_equal(array.numpy(), flat(array).numpy())


def test_reads_what_flower_writes() -> None:
    values = np.random.default_rng(0).normal(size=7).astype(np.float32)
    np.testing.assert_array_equal(flat(Array(values)).numpy(), values)


def test_empty() -> None:
    assert unpack(flat(pack({})), {}) == {}


@pytest.mark.parametrize("values", [[], [1.0], [3e38] * 4, [np.inf, 1.0], [np.inf, -np.inf], [3e38, 3e38, np.nan]])
def test_finite_values_are_told_from_others_by_their_sum(values: list[float]) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    assert all_finite(whole) == bool(torch.isfinite(whole).all())


def test_refuses_another_length_or_type() -> None:
    with pytest.raises(ValueError, match="does not fit a model of 6"):
        unpack(torch.zeros(5), {"a": (2, 3)})
    with pytest.raises(ValueError, match="expected float32"):
        flat(Array(np.zeros(3)))
