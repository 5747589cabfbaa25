"""Belief propagation: exact on a row of places against a sum over all arrangements, and what holds on every grid."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from experiments.placement.protocol import cut, degrade

from attacks.mjp import belief_propagation
from attacks.mjp.belief_propagation import beliefs
from attacks.mjp.jigsaw_solver import Costs, _Board, border_costs, solve
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


def test_what_grows_from_an_anchor_on_a_torus_is_the_picture_shifted() -> None:
    """Textured pieces in random order, three anchors."""
    image = torch.nn.functional.avg_pool2d(torch.rand(1, 3, 58, 58, generator=torch.Generator().manual_seed(1)), 3, 1)
    generator, grid, everywhere = torch.Generator().manual_seed(0), (7, 7), np.arange(49)
    order = torch.randperm(49, generator=generator)
    pieces = cut(image[0, :, :56, :56].double(), 8)[order]
    board = _Board(grid, Placement(solver="border").costs(grid, pieces, torch.ones(49, dtype=torch.bool)))
    torus = board.without_places()
    for turn in range(3):
        found = order.numpy()[torus.grown(torus.anchor(turn), 1.5)].reshape(grid)
        top, left = divmod(int((found.reshape(-1) == 0).nonzero()[0][0]), 7)
        assert (np.roll(found, (-top, -left), (0, 1)).reshape(-1) == everywhere).all()
        assert (order.numpy()[board.framed(torus.grown(torus.anchor(turn), 1.5))] == everywhere).all()


def test_the_torus_joins_the_last_column_to_the_first() -> None:
    costs = Costs(torch.rand(12, 12), torch.rand(12, 12), torch.rand(12, 12))
    board = _Board((3, 4), costs)
    torus = board.without_places()
    assert board.around[0].tolist() == [12, 1, 12, 4]
    assert torus.around[0].tolist() == [3, 1, 8, 4]
    assert torus.around[11].tolist() == [10, 8, 7, 3]
    assert not torus.at.any()
    assert _Board((2, 6), costs, torus=True).around[0].tolist() == [5, 1, 12, 6]  # two rows lie side by side already


@pytest.mark.parametrize(
    ("solver", "level"), [("border", math.inf), pytest.param("both", 20.0, marks=pytest.mark.long)]
)
def test_the_arrangement_found_hardly_costs_more_than_the_true_one(solver: str, level: float) -> None:
    """64 pieces in random order."""
    grid, everywhere = (8, 8), torch.ones(64, dtype=torch.bool)
    for number, image in enumerate(photographs(64, 2)):
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(64, generator=generator)
        pieces = degrade(cut(image.double(), 8), level, generator)[order]
        costs = Placement(solver=solver).costs(grid, pieces, everywhere)
        board = _Board(grid, costs)
        found = board.total(solve(grid, costs, everywhere).numpy())
        assert found <= 1.01 * board.total(order.argsort().numpy())
        assert found <= board.total(solve(grid, costs, everywhere, restarts=1).numpy())


def test_known_pieces_stay() -> None:
    pieces = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masked = torch.zeros(12, dtype=torch.bool)
    masked[[0, 3, 4, 11]] = True
    order = solve((3, 4), border_costs(pieces), masked, restarts=1)
    assert (order[~masked] == torch.arange(12)[~masked]).all()
    assert sorted(order.tolist()) == list(range(12))
