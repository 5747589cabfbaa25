"""Several updates of one client: exact where each patch is seen once, blind to other images, order and repetition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import ATTACKS
from attacks.linear.position_rows import read_position_rows
from attacks.linear.row_space import RowSpace
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from tests.attacks.mjp.conftest import models_of_rounds
from tests.attacks.mjp.test_mjp_subspace import jigsawed
from tests.conftest import photographs


def attack(views):
    return ATTACKS.get("mjp_rounds")()(views)


@pytest.fixture(scope="module")
def models() -> list[BuiltModel]:
    return models_of_rounds(6)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return photographs(64, 1).double()


@pytest.fixture(scope="module")
def views(models, image):
    """Masked, unmasked and heavily masked steps of one image, under changing weights."""
    gammas = (0.3, 0.5, 0.2, 0.3, 0.4, 0.3)
    return [jigsawed(m, image, g, seed=i) for i, (m, g) in enumerate(zip(models, gammas, strict=True))]


def error(found, image) -> float:
    return float((found.images - image).abs().max())


def test_exact_on_float64(views, image) -> None:
    found = attack(views)
    assert found.diagnosis == ""
    assert found.details["updates"] == 6
    assert found.details["open"] == 0
    assert found.known.all()
    assert error(found, image) < 1e-6


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(6)), again=st.lists(st.integers(0, 5), max_size=3))
def test_order_and_repetition_change_nothing(views, image, order, again) -> None:
    assert error(attack([views[i] for i in [*again, *order]]), image) < 1e-6


@settings(max_examples=8, deadline=None)
@given(gammas=st.lists(st.floats(0.0, 0.6), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_any_masks(models, image, gammas, seed) -> None:
    found = attack([jigsawed(m, image, g, seed=seed + i) for i, (m, g) in enumerate(zip(models, gammas, strict=True))])
    if found.details["open"] == 0:
        assert error(found, image) < 1e-6


def test_an_unjigsawed_step_settles_everything(models, image) -> None:
    views = [jigsawed(models[0], image, 0.0), jigsawed(models[1], image, 0.9, seed=1)]
    assert error(attack(views), image) < 1e-6


def test_updates_of_other_images_are_left_out(models, views, image) -> None:
    others = [jigsawed(models[i], photographs(64, 4)[i : i + 1].double(), 0.3, seed=i) for i in (1, 2, 3)]
    found = attack([others[0], *views[:3], *others[1:], *views[3:]])
    assert found.details["updates"] == len(views)
    assert error(found, image) < 1e-6
    space = RowSpace.of(read_position_rows(views[-1]))
    shares = [space.share_outside(read_position_rows(v)) for v in (*views, *others)]
    assert max(shares[: len(views)]) < 1e-7 < 1e-3 < min(shares[len(views) :])


def test_unfit_updates_are_left_out(views, image) -> None:
    withheld = dataclasses.replace(
        views[0], gradients={n: g for n, g in views[0].gradients.items() if not ("pos" in n or "qkv" in n)}
    )
    several = dataclasses.replace(views[1], local_steps=3, kind="weights")
    found = attack([withheld, several, *views])
    assert found.details["updates"] == len(views)
    assert error(found, image) < 1e-6


def test_each_round_adds(models, image) -> None:
    views = [jigsawed(m, image, 0.5, seed=i) for i, m in enumerate(models)]
    found = [attack(views[: t + 1]) for t in range(len(views))]
    assert [f.details["updates"] for f in found] == [1, 2, 3, 4, 5, 6]
    assert float(psnr(found[-1].images, image.float())) > float(psnr(found[0].images, image.float())) + 20


@pytest.mark.long  # the table of MJP attacks holds the same on 50 photographs
def test_deit_s_at_224() -> None:
    image = photographs(224, 1)
    models = [build_model("deit_s_mjp", num_classes=8, weights="random", seed=s) for s in range(4)]
    found = attack([jigsawed(m, image, 0.1, seed=i) for i, m in enumerate(models)])
    assert float(psnr(found.images, image)) > 60
