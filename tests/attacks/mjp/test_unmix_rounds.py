"""Patches that every mask hides, from several updates: found in the last update's first block and placed."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS
from attacks.mjp.shown_attention import ShownAttention
from attacks.mjp.token_search import TokenSearch
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.attacks.mjp.test_unmix import masked_update
from tests.conftest import photographs


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return photographs(64, 2)[1:]


@pytest.fixture(scope="module")
def views(image):
    """Three steps of one image under changing weights; some patches are hidden in all of them."""
    models = [build_model("vit_mini_64_mjp", num_classes=8, weights="random", seed=s) for s in range(3)]
    return [masked_update(m, image, gamma=0.4, seed=i)[0] for i, m in enumerate(models)]


def test_finds_what_no_update_shows(views, image) -> None:
    found, summed = (ATTACKS.get(name)()(views) for name in ("unmix_rounds", "mjp_rounds"))
    assert found.diagnosis == ""
    assert found.details["updates"] == 3
    assert found.details["never_seen"] == summed.details["never_seen"] > 3
    assert float(psnr(found.images, image)) > 60 > 35 > float(psnr(summed.images, image))
    # What no update shows is found but not vouched for; everything else is.
    assert int((~found.known).sum()) == found.details["never_seen"] * 8 * 8


def test_one_update_is_unmix(views) -> None:
    quick = {"search": TokenSearch(rounds=1, steps=20), "shown": ShownAttention(steps=2)}
    ours, single = (ATTACKS.get(name)(**quick)(views[-1:]) for name in ("unmix_rounds", "unmix"))
    assert torch.equal(ours.images, single.images)
    assert ours.details == single.details


def test_all_patches_seen_leaves_nothing_to_search(image) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    views = [masked_update(model, image, gamma=0.1, seed=i)[0] for i in range(6)]
    found, summed = (ATTACKS.get(name)()(views) for name in ("unmix_rounds", "mjp_rounds"))
    assert summed.details["never_seen"] == 0
    assert "tokens" not in found.details
    assert float(psnr(found.images, image)) > 60
