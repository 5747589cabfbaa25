"""Masked updates of low precision: what belongs together, and what it gives together."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.fixture(scope="module")
def views() -> list[Observation]:
    """Four jigsawed steps of one photograph and one of another before the last, gamma 0.1, in bfloat16."""
    model, draws = build_model("vit_mini_32_mjp", num_classes=10, weights="auto"), torch.Generator().manual_seed(3)
    mjp, images = DEFENSES.get("mjp")(gamma=0.1), photographs(32, 2)
    seen = [mjp.on_input(images[number : number + 1], model, draws, 1) for number in (0, 0, 0, 1, 0)]
    exact = [observe(model, one.images, torch.tensor([2]), one.position_mask) for one in seen]
    return [
        dataclasses.replace(view, gradients={name: g.bfloat16().float() for name, g in view.gradients.items()})
        for view in exact
    ]


def test_rounding_hides_no_longer_which_updates_show_the_image(views) -> None:
    image = photographs(32, 1)
    attack = ATTACKS.get("mjp_rounds")
    assert attack().obstacle(views) == ""
    assert "shows the image of the last one" in attack(intervals=False).obstacle(views)
    alone = float(psnr(ATTACKS.get("mjp_subspace")()(views).images, image))
    found = attack()(views)
    assert found.details["updates"] == 4
    assert float(psnr(found.images, image)) > max(30.0, alone + 10)


def test_what_the_errors_take_is_in_the_estimate(views) -> None:
    """Its solves take seconds, the others a hundredth."""
    attack = ATTACKS.get("mjp_rounds")
    assert attack().estimated_seconds(views) > 10 * attack(intervals=False).estimated_seconds(views)
    one, five = (attack().estimated_seconds(views[-count:]) for count in (1, 5))
    assert five == pytest.approx(5 * one)
