"""Gauss-Newton on rounded messages: products against finite differences, what is gained, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch
from experiments.message_precision.bounds import least_error_of_message, psnr_of
from small_vit import psnr, small_vit, view

from attacks import ATTACKS, Observation, Reconstruction
from attacks.gradient_matching.gauss_newton import BESIDE
from attacks.gradient_matching.rounded_message import Message
from attacks.linear.image_prior import VectorialVariation
from attacks.tokenizer import find_tokenizer
from fedmjp.defenses.chain import read_defense

FLOAT16, INT8 = "quantise:quantise_format=float16", "quantise"


def sent(observation: Observation, defense: str) -> Observation:
    """The update as it arrives under a defence."""
    gradients, _ = read_defense(defense).message(dict(observation.gradients), torch.Generator().manual_seed(0), {})
    return dataclasses.replace(observation, gradients=gradients)


@pytest.fixture(scope="module")
def rounded() -> tuple[Observation, torch.Tensor]:
    """A float16 message of one photograph, and the photograph."""
    observation, images = view(small_vit())
    return sent(observation, FLOAT16), images


@pytest.fixture(scope="module")
def searched() -> Callable[[str], tuple[Observation, torch.Tensor, Reconstruction]]:
    """By format: a message of one photograph, the photograph, and what the attack makes of it in eight steps."""
    exact, images = view(small_vit())

    @cache
    def of(defense: str) -> tuple[Observation, torch.Tensor, Reconstruction]:
        """Of a message in this format."""
        message = sent(exact, defense)
        return message, images, ATTACKS.get("gauss_newton")(steps=8, draws=2)([message])

    return of


def message_of(observation: Observation) -> Message:
    """Of the small ViT, simulated in float64."""
    model = small_vit()
    model.module.double()
    double = dataclasses.replace(observation, model=model.module)
    return Message(double, find_tokenizer(model.module, double.image_shape), VectorialVariation())


def test_the_products_are_those_of_finite_differences(rounded) -> None:
    observation, images = rounded
    message = message_of(observation)
    image, generator = message.normalised(images), torch.Generator().manual_seed(1)
    at = message.linearise(image)
    along = torch.randn(image.shape, generator=generator, dtype=torch.float64)
    pushed, shift = at.push(along), 1e-4
    ahead, behind = (message.linearise(image + s * shift * along) for s in (1, -1))
    pairs = zip(pushed, ahead.differences(), behind.differences(), at.deviations, strict=True)
    for product, plus, minus, deviation in pairs:
        expected = (minus - plus) / (2 * shift) / deviation  # the residual falls with the gradient
        assert float((product - expected).norm()) <= 1e-3 * float(expected.norm()) + 1e-9
    entries = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in pushed]
    onward = sum(float((p * w).sum()) for p, w in zip(pushed, entries, strict=True))
    assert float((along * at.pull(entries)).sum()) == pytest.approx(onward, rel=1e-8)


@pytest.mark.parametrize("away", [0.0, 0.3])
def test_the_right_side_of_a_step_is_the_slope_of_the_objective(searched, away: float) -> None:
    """At the photograph, where the rounding explains the misfit, and where the errors have a size of their own."""
    observation, images, _ = searched(INT8)
    message, generator = message_of(observation), torch.Generator().manual_seed(2)
    along, noise = torch.randn((2, *images.shape), generator=generator, dtype=torch.float64)
    image, shift = message.normalised(images) + away * noise, 1e-5
    at = message.linearise(image)
    plus, minus = (message.linearise(image + s * shift * along).objective(at.relaxed) for s in (1, -1))
    slope = -2 * float((along * (at.pull(at.residual) - at.relaxed * at.prior.times(image))).sum())
    assert (plus - minus) / (2 * shift) == pytest.approx(slope, rel=1e-3)


@pytest.mark.long
def test_deviations_are_those_of_the_inverse_precision(searched) -> None:
    """Against a dense inverse; four draws of a patch of 48 values have an error of a few percent."""
    observation, images, _ = searched(INT8)
    message = message_of(observation)
    at, attack = message.linearise(message.normalised(images)), ATTACKS.get("gauss_newton")(iterations=20)
    units = torch.eye(images.numel(), dtype=torch.float64).view(-1, *images.shape)
    variances = torch.linalg.inv(torch.stack([at.times(unit).flatten() for unit in units])).diagonal()
    pixels = message.in_pixels(message.in_pixels(variances.view(images.shape)))
    expected = message.tokenizer.patchify(pixels)[0].mean(dim=1).sqrt()
    ratios = attack._deviations(at, torch.Generator().manual_seed(0)) / expected
    assert float(ratios.min()) > 0.8
    assert float(ratios.max()) < 1.25


@pytest.mark.parametrize("defense", [FLOAT16, INT8, "quantise:quantise_rounding=stochastic"])
def test_only_the_photograph_reproduces_the_rounding(rounded, defense: str) -> None:
    """A hundredth of the pixels' range away, the squared residuals exceed those of rounding."""
    exact, images = view(small_vit())
    message = message_of(sent(exact, defense))
    image, noise = message.normalised(images), torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    assert abs(message.linearise(image).excess()) < BESIDE
    assert message.linearise(image + 0.04 * noise).excess() > BESIDE


@pytest.mark.parametrize("defense", [pytest.param(FLOAT16, marks=pytest.mark.long), INT8])
def test_it_gains_6_db_on_the_plain_solve_and_ends_at_the_rounding(searched, defense: str) -> None:
    observation, images, found = searched(defense)
    plain = ATTACKS.get("patch_embedding")(intervals=False)([observation])
    assert psnr(found, images) > psnr(plain, images) + 6
    assert found.diagnosis == ""
    assert bool(found.known.all())
    assert found.details["misfit"] == pytest.approx(1, abs=0.05)


@pytest.mark.long
def test_it_ends_at_the_bound_of_the_whole_message(searched) -> None:
    observation, images, found = searched(INT8)
    assert psnr(found, images) == pytest.approx(psnr_of(least_error_of_message(observation, images)), abs=1.5)


@pytest.mark.long
def test_nothing_is_vouched_for_before_it_settles(rounded) -> None:
    """Two steps explain the misfit already."""
    observation, _ = rounded
    found = ATTACKS.get("gauss_newton")(steps=2)([observation])
    assert found.details["misfit"] < 1.5
    assert "ended after 2 steps while it still came nearer" in found.diagnosis
    assert not found.known.any()


def test_what_it_cannot_use_is_said_in_words(rounded) -> None:
    observation, _ = rounded
    attack, (exact, _) = ATTACKS.get("gauss_newton")(), view(small_vit())
    two, _ = view(small_vit(), count=2)
    for given, words in (
        (exact, "digits of float32"),
        (sent(two, FLOAT16), "not that of one image"),
        (dataclasses.replace(observation, gradients={"head.bias": observation.gradients["head.bias"]}), "no position"),
    ):
        assert words in attack.obstacle([given])
        assert words in attack([given]).diagnosis
    assert attack.obstacle([observation]) == ""
