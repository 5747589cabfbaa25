"""Belief propagation: exact on a row of places against a sum over all arrangements, and what holds on every grid."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from experiments.placement.protocol import cut, degrade

from attacks.mjp import belief_propagation
from attacks.mjp.belief_propagation import beliefs
from attacks.mjp.jigsaw_solver import _Board, border_costs, solve
from attacks.mjp.placement import Placement
from tests.conftest import photographs


def row_of(count: int) -> np.ndarray:
    """The places beside each of a row's places: left, right, none above, none below."""
    places = np.arange(count)
    none = np.full(count, count)
    return np.stack(
        [np.where(places > 0, places - 1, count), np.where(places < count - 1, places + 1, count), none, none], 1
    )


def test_beliefs_on_a_row_are_sums_over_all_arrangements(monkeypatch) -> None:
    """A row has no loops; without exclusion a piece may lie at several places, though not beside itself."""
    monkeypatch.setattr(belief_propagation, "EXCLUSION", 0.0)
    monkeypatch.setattr(belief_propagation, "FIRST_BETA", 1.0)
    rng, count = np.random.default_rng(0), 4
    right, below, alone = rng.exponential(2.0, (3, count, count))
    found = beliefs(right, below, alone, row_of(count), np.ones((4, count, count)), 1.0)
    sums = np.zeros((count, count))
    for pieces in product(range(count), repeat=count):
        if any(one == other for one, other in zip(pieces, pieces[1:], strict=False)):
            continue
        cost = sum(right[one, other] for one, other in zip(pieces, pieces[1:], strict=False))
        cost += sum(alone[place, piece] for place, piece in enumerate(pieces))
        for place, piece in enumerate(pieces):
            sums[place, piece] += np.exp(-cost)
    np.testing.assert_allclose(found, sums / sums.sum(axis=1, keepdims=True), rtol=1e-4)


def test_every_piece_is_believed_at_one_place_in_all() -> None:
    """Two places want the same piece, and the one that has another choice gives way."""
    alone = np.array([[0.0, 1.0, 9.0], [0.0, 9.0, 9.0], [9.0, 9.0, 0.0]])
    flat = np.zeros((3, 3))
    found = beliefs(flat, flat, alone, row_of(3), np.ones((4, 3, 3)), 2.0)
    assert found.argmax(axis=1).tolist() == [1, 0, 2]
    assert found.sum(axis=0) == pytest.approx(np.ones(3), abs=0.1)


@pytest.mark.parametrize("solver", ["border", "both"])
def test_beliefs_find_what_annealing_misses(solver: str) -> None:
    """64 pieces in random order, as they are under borders, with noise of 20 dB under both: cheaper arrangements."""
    least = {"annealed": 0.0, "propagated": 0.0}
    grid, everywhere, holes = (8, 8), torch.ones(64, dtype=torch.bool), np.arange(64)
    for number, image in enumerate(photographs(64, 4)):
        generator = torch.Generator().manual_seed(number)
        level = float("inf") if solver == "border" else 20.0
        pieces = degrade(cut(image.double(), 8), level, generator)[torch.randperm(64, generator=generator)]
        board = _Board(grid, Placement(solver=solver).costs(grid, pieces, everywhere))
        rng = np.random.default_rng(0)
        least["annealed"] += board.total(board.exchanged(board.anneal(rng.permutation(holes), holes, rng, 8000), holes))
        least["propagated"] += board.total(board.exchanged(board.propagated(holes, rng, 1.5), holes))
    assert least["propagated"] < least["annealed"]


def test_known_pieces_stay() -> None:
    pieces = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked = torch.zeros(12, dtype=torch.bool)
    masked[[0, 3, 4, 11]] = True
    order = solve((3, 4), border_costs(pieces), masked, restarts=1)
    assert (order[~masked] == torch.arange(12)[~masked]).all()
    assert sorted(order.tolist()) == list(range(12))
