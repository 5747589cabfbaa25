"""Gaussian noise on one update: what the equations still tell is vouched for, patch by patch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from tests.conftest import observe, photographs


def noised(update: Observation, share: float) -> Observation:
    noise, draws = DEFENSES.get("noise")(noise_multiplier=share, noise_unit="entry"), torch.Generator().manual_seed(0)
    return dataclasses.replace(update, gradients=noise.on_update(dict(update.gradients), draws))


def by_patch(image: torch.Tensor, side: int) -> torch.Tensor:
    """(N,) means over patches."""
    return torch.nn.functional.avg_pool2d(image.mean(dim=1, keepdim=True), side).flatten()


def test_noise_that_no_equation_measures_leaves_nothing_to_vouch_for() -> None:
    """196 patches and 192 channels: the equations fit any noise, and its size is not known."""
    built, image = build_model("vit_ti", num_classes=8, weights="random"), photographs(224, 1)
    attack, update = ATTACKS.get("patch_embedding")(), observe(built, image)
    assert attack([update]).known.any()
    assert not attack([noised(update, 1e-4)]).known.any()


@pytest.mark.parametrize("weights", ["auto", "random"])
def test_patches_that_noise_spoils_are_not_vouched_for(weights: str) -> None:
    """Six photographs with noise of 1e-4 of the update's rms entry: 1 in 50 at most is wrong of those vouched for."""
    built, images = build_model("vit_mini_64", num_classes=8, weights=weights), photographs(64, 6)
    attack, sure, right = ATTACKS.get("patch_embedding")(), [], []
    for number in range(len(images)):
        image = images[number : number + 1]
        update = observe(built, image, torch.tensor([number]))
        assert attack([update]).known.all()
        found = attack([noised(update, 1e-4)])
        assert found.diagnosis == ""
        sure.append(by_patch(found.known.float(), built.patch_size) > 0.99)
        right.append(by_patch((found.images - image).square(), built.patch_size) < 10**-2.5)
    sure, right = torch.cat(sure), torch.cat(right)
    assert int((~right).sum()) > 15  # the prior settles them wrongly
    assert int(sure.sum()) > 0.4 * len(sure)
    assert int((sure & ~right).sum()) <= 0.02 * int(sure.sum())
