"""Patches that every mask hides, from several updates: found in the last update's first block and placed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS
from attacks.mjp.shown_attention import ShownAttention
from attacks.mjp.token_search import TokenSearch
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.attacks.mjp.test_unmix import masked_update
from tests.conftest import observe, photographs


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


@pytest.mark.long
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


@pytest.mark.long
def test_noise_widens_the_expected_errors() -> None:
    """Noise of 1e-5 of the update's rms entry, gamma 0.5: two of 32 patches would be vouched for below 25 dB."""
    model, image = build_model("vit_mini_64_mjp", num_classes=8, weights="auto"), photographs(64, 3)[2:]
    noise, seen = DEFENSES.get("noise")(noise_multiplier=1e-5, noise_unit="entry"), []
    for number in range(3):
        draws = torch.Generator().manual_seed(20 + number)
        shown = DEFENSES.get("mjp")(gamma=0.5).on_input(image, model, draws, 1)
        update = observe(model, shown.images, torch.tensor([2]), shown.position_mask)
        gradients = noise.on_update(dict(update.gradients), torch.Generator().manual_seed(18 + number))
        seen.append(dataclasses.replace(update, gradients=gradients, round=number))
    found = ATTACKS.get("unmix_rounds")()(seen)
    assert found.diagnosis == ""
    vouched = found.known.any(dim=1)
    errors = torch.nn.functional.avg_pool2d((found.images - image).square().mean(dim=1), 8)
    assert int(vouched.sum()) >= 10 * 8 * 8
    assert float(errors[vouched[:, ::8, ::8]].max()) < 10**-2.5
