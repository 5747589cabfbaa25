"""The confidence of completed patches: what it depends on, what it claims, and whether the claim holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.linear.confidence import RIGHT_DB, covariates, probabilities, surest
from attacks.linear.image_prior import Settled, VectorialVariation, _Scene
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.joined_updates import JoinedUpdates, join_updates
from attacks.tokenizer import find_tokenizer
from fedmjp.metrics import patch_recovery
from fedmjp.models import build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed
from tests.conftest import photographs

# Photographs of the small calibration, and the largest difference of shares that it allows: about four standard errors
# of the mean (0.016).
COUNT, TOLERANCE = 16, 0.06


@pytest.fixture(scope="module")
def model():
    return build_model("vit_mini_64_mjp", num_classes=200, weights="auto")


@pytest.fixture(scope="module")
def histories(model) -> list[list[Observation]]:
    """Two updates of each of the embedded photographs, which are not those of the fit."""
    gammas = (0.1, 0.3, 0.5, 0.9)
    images = enumerate(photographs(64, COUNT))
    return [[jigsawed(model, x[None], gammas[i % 4], seed=2 * i + t) for t in range(2)] for i, x in images]


def settled_of(**changes) -> Settled:
    found = Settled(
        patches=torch.zeros(9, 192, dtype=torch.float64),
        deviation=torch.full((9,), 0.02, dtype=torch.float64),
        shared=0.003,
        gradient=torch.full((9,), 0.1, dtype=torch.float64),
        open=5,
    )
    return dataclasses.replace(found, **changes)


@pytest.fixture
def tokenizer(model):
    return dataclasses.replace(find_tokenizer(model.module, (3, 64, 64)), grid=(3, 3))


def test_as_many_patches_as_are_expected_to_be_right_the_surest_first() -> None:
    assert surest(torch.tensor([0.2, 0.9, 0.5, 0.7])).tolist() == [False, True, False, True]  # 2.3 expected
    assert not surest(torch.full((4,), 0.1)).any()  # 0.4 expected
    assert surest(torch.full((4,), 0.5)).tolist() == [True, True, False, False]
    assert surest(torch.ones(4)).all()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_less_certain_answers_are_less_probable(several: bool, shown: bool, tokenizer) -> None:
    visible = torch.full((9,), shown)

    def chance(**changes) -> float:
        return float(probabilities(settled_of(**changes), visible, tokenizer, several=several)[4])

    one = torch.ones(9, dtype=torch.float64)
    assert chance(deviation=0.01 * one) > chance() > chance(deviation=0.04 * one)
    assert chance(shared=0.001) > chance() > chance(shared=0.01)
    assert chance(open=0) == 1.0
    assert 0 <= chance(deviation=0 * one, shared=0.0, gradient=0 * one) <= 1
    assert chance(deviation=one, shared=1.0) < 1e-3


def test_a_hidden_patch_is_judged_by_the_texture_of_its_visible_neighbours(tokenizer) -> None:
    gradient = torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0, 9.0, 0.7, 9.0, 9.0], dtype=torch.float64)
    shown = torch.tensor([True, True, True, True, False, False, True, False, False])
    around = covariates(settled_of(gradient=gradient), shown, tokenizer)[:, 3].exp()
    assert float(around[4]) == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.7) / 5)
    assert float(around[0]) == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert float(around[8]) == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.7) / 5)  # no visible neighbour: all visible


def test_shared_deviation_agrees_with_a_dense_inverse(model) -> None:
    update = solve_masked(read_position_rows(jigsawed(model, photographs(64, 1), 0.05)))
    scene = _Scene(find_tokenizer(model.module, (3, 64, 64)), (0.2, 0.2, 0.3), update.estimate())
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 64, generator=generator, dtype=torch.float64) + 0.1
    still = torch.zeros_like(scene.start)
    scene.start = still

    def energy(shared: torch.Tensor) -> torch.Tensor:
        shift = shared.expand(64, -1)
        down, right = scene.gradient(shift)
        return (weights * (down.square() + right.square())).sum() / 2 + (scene.precision * shift.square()).sum() / 2

    hessian = torch.func.jacfwd(torch.func.grad(energy))(torch.zeros(scene.precision.shape[1], dtype=torch.float64))
    pixels = scene.pixel.flatten(1)
    oracle = ((pixels.T @ torch.linalg.inv(hessian)) * pixels.T).sum(dim=1).mean().sqrt()
    assert scene.shared_deviation(weights) == pytest.approx(float(oracle), rel=1e-6)


@pytest.fixture(scope="module")
def answers(histories, model) -> list[tuple[Settled, JoinedUpdates, float]]:
    """Completed patches after one and after two updates, their equations, and the share that is right."""
    prior, found = VectorialVariation(), []
    for views, image in zip(histories, photographs(64, COUNT), strict=True):
        for used in (views[-1:], views):
            joined, target = join_updates(used), used[-1]
            settled = prior.settle(joined.estimate(), joined.tokenizer, target.std)
            answer = target.to_pixels(joined.tokenizer.unpatchify(settled.patches[None])).float()
            found.append((settled, joined, float(patch_recovery(answer, image[None], model.patch_size, RIGHT_DB))))
    return found


def excess(answers, scale: float = 1.0) -> float:
    """Mean difference of the shares vouched for and right, with deviations times `scale`."""
    differences = []
    for settled, joined, right in answers:
        changed = dataclasses.replace(settled, deviation=scale * settled.deviation, shared=scale * settled.shared)
        several = joined.equations.updates > 1
        vouched = surest(probabilities(changed, joined.shown, joined.tokenizer, several=several))
        differences.append(float(vouched.double().mean()) - right)
    return sum(differences) / len(differences)


def test_as_much_is_vouched_for_as_is_right(answers) -> None:
    """On photographs that the curves were not fitted on; half or twice the deviation does not pass."""
    assert abs(excess(answers)) < TOLERANCE
    assert excess(answers, 0.5) > TOLERANCE
    assert excess(answers, 2.0) < -TOLERANCE


def test_attacks_vouch_by_these_probabilities(histories) -> None:
    views = histories[1]
    joined, target = join_updates(views), views[-1]
    settled = VectorialVariation().settle(joined.estimate(), joined.tokenizer, target.std)
    expected = surest(probabilities(settled, joined.shown, joined.tokenizer, several=True))
    found = ATTACKS.get("mjp_rounds")()(views)
    assert torch.equal(found.known[0, 0, ::8, ::8].flatten(), expected)
