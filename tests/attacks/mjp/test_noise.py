"""Gaussian noise on the updates of clients that hide positions: joined as without it, or diagnosed."""

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
    """Six jigsawed steps of one photograph, gamma 0.1, without noise."""
    model, draws = build_model("vit_mini_32_mjp", num_classes=10, dal="nonlinear"), torch.Generator().manual_seed(3)
    mjp, image = DEFENSES.get("mjp")(gamma=0.1), photographs(32, 1)
    seen = [mjp.on_input(image, model, draws, 1) for _ in range(6)]
    return [observe(model, one.images, mask=one.position_mask) for one in seen]


def noised(views: list[Observation], share: float) -> list[Observation]:
    noise, draws = DEFENSES.get("noise")(noise_multiplier=share, noise_unit="entry"), torch.Generator().manual_seed(0)
    return [dataclasses.replace(v, gradients=noise.on_update(dict(v.gradients), draws)) for v in views]


def test_rounds_are_joined_where_masked_rows_show_the_noise(views) -> None:
    image = photographs(32, 1)
    alone, joined = (ATTACKS.get(name)()(noised(views, 1e-4)) for name in ("mjp_subspace", "mjp_rounds"))
    assert alone.diagnosis == joined.diagnosis == ""
    assert joined.details["updates"] == 6
    assert float(psnr(joined.images, image)) > max(45.0, float(psnr(alone.images, image)) + 20)


def test_an_unknown_term_in_the_rows_is_no_noise(views) -> None:
    """As weight decay adds one: masked rows have it too, and are not alike."""
    last = dict(views[-1].gradients)
    last["pos_embed"] = last["pos_embed"] + 1e-3 * dict(views[-1].model.named_parameters())["pos_embed"].detach()
    found = ATTACKS.get("mjp_rounds")()([*views[:-1], dataclasses.replace(views[-1], gradients=last)])
    assert found.diagnosis != ""


def test_strong_noise_is_diagnosed(views) -> None:
    assert "noise" in ATTACKS.get("mjp_rounds")()(noised(views, 0.3)).diagnosis


@pytest.mark.parametrize("name", ["mjp_subspace", "mjp_rounds", "unmix_rounds"])
def test_nothing_is_vouched_for_under_noise(views, name: str) -> None:
    """The probabilities were calibrated on round-off; under noise a tenth and more of what they give is wrong."""
    attack = ATTACKS.get(name)()
    assert attack(views).known.any()
    found = attack(noised(views, 1e-5))
    assert (found.diagnosis, bool(found.known.any())) == ("", False)


def test_noise_in_an_earlier_update_counts(views) -> None:
    attack = ATTACKS.get("mjp_rounds")()
    found = attack([*noised(views[:1], 1e-5), *views[1:]])
    assert found.details["updates"] == 6
    assert not found.known.any()
    assert attack(views[1:]).known.any()


def test_without_positions_noise_hides_the_mask() -> None:
    """62 of 64 places count as masked, as if two updates had hidden them: of the 64 patches completed 60 are wrong."""
    model, draws = build_model("vit_mini_64_mjp", num_classes=8, weights="auto"), torch.Generator()
    image, seen = photographs(64, 5)[4:], []
    for number in range(4):
        shown = DEFENSES.get("mjp")(gamma=0.3).on_input(image, model, draws.manual_seed(40 + number), 1)
        update = observe(model, shown.images, torch.tensor([4]), shown.position_mask)
        gradients = {name: g for name, g in update.gradients.items() if name != "pos_embed"}
        seen.append(dataclasses.replace(update, gradients=gradients, round=number))
    found = ATTACKS.get("mjp_rounds")(intervals=False)(noised(seen, 1e-5))
    assert (found.diagnosis, bool(found.known.any())) == ("", False)
