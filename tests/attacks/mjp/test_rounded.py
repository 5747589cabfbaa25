"""Masked updates of low precision: what belongs together, and what it gives together."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense
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


@pytest.mark.long
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


def one_update(
    number: int, gamma: float, model: str = "vit_mini_32_mjp", seed: int | None = None
) -> tuple[Observation, torch.Tensor]:
    """A jigsawed step of one photograph, exact, and what the client was shown."""
    built, size = build_model(model, num_classes=10, weights="auto"), int(model.split("_")[2])
    image, draws = photographs(size, number + 1)[number:], torch.Generator()
    draws.manual_seed(number if seed is None else seed)
    seen = DEFENSES.get("mjp")(gamma=gamma).on_input(image, built, draws, 1)
    return observe(built, seen.images, torch.tensor([2]), seen.position_mask), seen.images


def quantised(view: Observation, defense: str) -> Observation:
    gradients, _ = read_defense(defense).message(dict(view.gradients), torch.Generator().manual_seed(0), {})
    return dataclasses.replace(view, gradients=gradients)


@pytest.mark.parametrize(("number", "gamma", "gain"), [(3, 0.1, 1.0), (2, 0.5, 0.0)])
def test_a_search_that_misses_the_equations_counts_where_nearly_all_is_shown(
    number: int, gamma: float, gain: float
) -> None:
    """Returned weights whose misfit stays above the bound; with half of the patches hidden the plain solve is kept."""
    view, image = one_update(number, gamma)
    weights, rate = dict(view.model.named_parameters()), 0.03
    returned = {n: (w.detach() - (w.detach() - rate * view.gradients[n])) / rate for n, w in weights.items()}
    view = dataclasses.replace(view, gradients=returned, kind="weights", learning_rate=rate)
    attack = ATTACKS.get("mjp_subspace")
    corrected, plain = (float(psnr(attack(intervals=i)([view]).images, image)) for i in (True, False))
    assert corrected > plain + gain if gain else corrected == plain


def test_nothing_is_vouched_for_where_confidence_was_not_calibrated() -> None:
    """int8 with one scale a tensor: nine of nine patches are wrong that it would give."""
    exact, _ = one_update(2, 0.3, "vit_mini_64_mjp")
    attack = ATTACKS.get("mjp_subspace")(intervals=False)
    assert attack([exact]).known.any()
    found = attack([quantised(exact, "quantise")])
    assert (found.diagnosis, bool(found.known.any())) == ("", False)


def test_one_update_without_positions_vouches_for_nothing_and_float16_of_none() -> None:
    """Of the former's patches 13 of 13 are wrong that it would give, of four of the latter 60 of 64."""

    def views(number: int) -> list[Observation]:
        """Four updates of a photograph without the position gradient."""
        seen = [one_update(number, 0.3, "vit_mini_64_mjp", seed=10 * number + k)[0] for k in range(4)]
        gradients = [{n: g for n, g in one.gradients.items() if n != "pos_embed"} for one in seen]
        return [
            dataclasses.replace(o, gradients=g, round=k) for k, (o, g) in enumerate(zip(seen, gradients, strict=True))
        ]

    attack, exact = ATTACKS.get("mjp_rounds")(intervals=False), views(0)
    assert not attack(exact[-1:]).known.any()
    assert attack(exact).known.all()
    rounded = attack([quantised(view, "quantise:quantise_format=float16") for view in views(4)])
    assert (rounded.diagnosis, bool(rounded.known.any())) == ("", False)
