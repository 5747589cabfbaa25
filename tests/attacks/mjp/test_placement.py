"""Placing pieces: the search against brute force, the predictor's symmetries and loss, what it needs, photographs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch

from attacks import ATTACKS, Capability, ThreatModel, UsageError
from attacks.mjp.jigsaw_solver import Costs, solve
from attacks.mjp.piece_predictor import SHIPPED, UNKNOWN, PiecePredictor, PieceScores, place_features
from attacks.mjp.piece_training import Recipe, prediction_loss, train_predictor
from attacks.mjp.placement import Placement
from fedmjp.audit.suite import select_attacks
from fedmjp.defenses.masking import block_masks, jigsaw_order
from fedmjp.models import build_model
from tests.conftest import observe, photographs

GRID = (2, 3)
PUBLIC = ThreatModel(ThreatModel().grants | {Capability.AUXILIARY_DATA})


def pieces_of(image: torch.Tensor, size: int) -> torch.Tensor:
    """(N, 3, size, size) of an image (3, H, W), row by row."""
    cut = image.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)
    return cut.flatten(0, 1)


def placed(image: torch.Tensor, size: int, hidden: float = 1.0, level: float = math.inf, **settings) -> float:
    """Share of the hidden pieces, which are in random order, that are put in their places; `level` dB of noise."""
    generator, pieces = torch.Generator().manual_seed(0), pieces_of(image.double(), size)
    noise = torch.randn(pieces.shape, generator=generator, dtype=pieces.dtype)
    pieces = pieces + (0 if math.isinf(level) else 10 ** (-level / 20)) * noise
    side = math.isqrt(len(pieces))
    mask = block_masks(1, (side, side), hidden, generator)
    order = jigsaw_order(mask, generator)[0]
    found = order[Placement(**settings).place((side, side), pieces[order], mask[0])]
    return float((found == torch.arange(len(pieces)))[mask[0]].double().mean())


@pytest.mark.parametrize("hidden", [(0, 1, 2, 3, 4, 5), (0, 2, 3, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_solver_finds_the_cheapest_arrangement(hidden: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    right, below, at = 6 * torch.rand(3, 6, 6, generator=generator, dtype=torch.float64)
    masked = torch.zeros(6, dtype=torch.bool)
    masked[list(hidden)] = True

    def cost(order: Sequence[int]) -> float:
        rows, columns = GRID
        total = sum(float(at[place, piece]) for place, piece in enumerate(order))
        for i in range(rows):
            for j in range(columns):
                own = order[columns * i + j]
                total += float(right[own, order[columns * i + j + 1]]) if j + 1 < columns else 0.0
                total += float(below[own, order[columns * (i + 1) + j]]) if i + 1 < rows else 0.0
        return total

    fitting = [o for o in permutations(range(6)) if all(o[i] == i for i in range(6) if i not in hidden)]
    found = solve(GRID, Costs(right, below, at), masked).tolist()
    assert cost(found) == pytest.approx(min(map(cost, fitting)))


def test_scores_do_not_depend_on_the_order_of_the_pieces() -> None:
    predictor = PiecePredictor.load(SHIPPED)
    pieces, order = pieces_of(photographs(64, 1)[0], 8), torch.randperm(64, generator=torch.Generator().manual_seed(1))
    places = torch.where(torch.arange(64) < 20, torch.arange(64), UNKNOWN)
    with torch.no_grad():
        first = predictor(pieces[None], (8, 8), places[None])
        second = predictor(pieces[order][None], (8, 8), places[order][None])
    torch.testing.assert_close(second.place[0], first.place[0, order], atol=1e-4, rtol=1e-4)
    for ours, theirs in ((second.right, first.right), (second.below, first.below)):
        torch.testing.assert_close(ours[0], theirs[0][order][:, order], atol=1e-4, rtol=1e-4)
    assert place_features((2, 5)).shape == (10, place_features((8, 8)).shape[1])


def test_loss_is_that_of_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    place, right, below = torch.randn(3, 1, 6, 6, generator=generator, dtype=torch.float64)
    places = torch.tensor([[UNKNOWN, 1, UNKNOWN, UNKNOWN, 4, 5]])

    def surprise(logits: dict[int, float], true: int) -> float:
        return math.log(sum(math.exp(v) for v in logits.values())) - logits[true]

    free = [0, 2, 3]
    total = sum(surprise({j: float(place[0, i, j]) for j in free}, i) for i in free) / 3
    for logits, pairs in ((right, [(0, 1), (1, 2), (3, 4), (4, 5)]), (below, [(0, 3), (1, 4), (2, 5)])):
        for first, second in pairs:
            onward = surprise({j: float(logits[0, first, j]) for j in range(6) if j != first}, second)
            back = surprise({i: float(logits[0, i, second]) for i in range(6) if i != second}, first)
            total += (onward + back) / 2 / len(pairs)
    found = prediction_loss(PieceScores(place, right, below), GRID, places)
    assert float(found) == pytest.approx(total, rel=1e-5)  # softmax in float32


def test_training_lowers_the_loss_and_the_file_gives_it_back(tmp_path) -> None:
    losses: list[float] = []
    images = (255 * photographs(32, 6)).to(torch.uint8)
    recipe = Recipe(width=16, depth=1, grids=(4,), pieces=256, steps=60, learning_rate=1e-2)
    predictor = train_predictor(images, recipe, lambda step, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    predictor.save(tmp_path / "own.safetensors")
    again = PiecePredictor.load(tmp_path / "own.safetensors")
    pieces, places = torch.rand(1, 16, 3, 5, 5), torch.full((1, 16), UNKNOWN)
    with torch.no_grad():
        ours, theirs = (one(pieces, (4, 4), places).place for one in (predictor, again))
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)  # stored in half precision


@pytest.mark.parametrize("solver", ["border", "both"])
def test_pieces_in_random_order_are_all_put_back(solver: str) -> None:
    """Every piece of the photographs of which no piece is close to uniform."""
    cut = [(image, pieces_of(image, 32).flatten(2)) for image in photographs(224, 23)]
    textured = [image for image, pieces in cut if float(pieces.std(dim=2).min()) > 0.04]
    assert len(textured) == 4
    for image in textured:
        assert placed(image, 32, solver=solver, restarts=1) == 1.0


def test_the_predictor_places_what_borders_cannot() -> None:
    """Half of the pieces in their places, all with noise of 20 dB."""
    images = photographs(64, 4)
    border, both = (
        sum(placed(image, 8, 0.5, level=20, solver=solver, restarts=1) for image in images) / len(images)
        for solver in ("border", "both")
    )
    assert both > border + 0.1


@pytest.mark.parametrize("name", ["unmix", "unmix_rounds", "patch_set"])
def test_the_predictor_needs_auxiliary_data(name: str) -> None:
    learned = ATTACKS.get(name)(placement=Placement(solver="both"))
    with pytest.raises(UsageError, match="auxiliary_data"):
        learned.require(ThreatModel(), name)
    learned.require(PUBLIC, name)
    plain = ATTACKS.get(name)()
    plain.require(ThreatModel(), name)
    assert plain.granted(ThreatModel()).placement.solver == "border"
    assert plain.granted(PUBLIC).placement.solver == "both"
    kept = ATTACKS.get(name)(placement=Placement(solver="border")).granted(PUBLIC)
    assert kept.placement.solver == "border"


def test_a_suite_uses_what_is_granted() -> None:
    model = build_model("vit_mini_64_nope", num_classes=8, weights="random")
    view = observe(model, photographs(64, 1))
    for threat, solver in ((ThreatModel(), "border"), (PUBLIC, "both")):
        assert select_attacks(["patch_set"], [view], threat).chosen["patch_set"].placement.solver == solver
        assert select_attacks(["auto"], [view], threat).chosen["patch_set"].placement.solver == solver


def test_says_what_the_predictor_cannot_place(tmp_path) -> None:
    everywhere = torch.ones(4, dtype=torch.bool)
    with pytest.raises(UsageError, match="the images have 1: pass placement.solver=border"):
        Placement(solver="both").place((2, 2), torch.rand(4, 1, 8, 8), everywhere)
    with pytest.raises(UsageError, match="holds no predictor of places"):
        Placement(solver="learned", predictor=str(tmp_path / "none")).place((2, 2), torch.rand(4, 3, 8, 8), everywhere)
