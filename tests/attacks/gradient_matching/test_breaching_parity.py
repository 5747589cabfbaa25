"""Comparison of our attacks with the `breaching` package: same update, same initial images, same number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
import torch
from small_vit import attack, psnr, small_vit, view
from torch import Tensor

from attacks import ATTACKS
from attacks.gradient_matching import engine
from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import Cosine, SquaredL2
from attacks.gradient_matching.optimisers import LBFGS, Adam, CosineDecay, StepDecay
from attacks.gradient_matching.priors import SmallNorm

breaching = pytest.importorskip("breaching")

from attacks.breaching import prepare_attack  # noqa: E402

STEPS = 40


@dataclass(frozen=True)
class TheirVariation:
    """The package's total variation, which includes the image's border, as a prior of our attacks."""

    scale: float
    active_from: float = 0.0

    def __call__(self, images: Tensor) -> Tensor:
        from breaching.attacks.auxiliaries.regularizers import TotalVariation

        theirs = TotalVariation({"dtype": images.dtype, "device": images.device}, scale=self.scale)
        return theirs(images[0, 0])[None, None]


@dataclass(frozen=True, kw_only=True)
class Composed(GradientMatching):
    """An attack with a given recipe."""

    parts: Any

    def recipe(self, observation) -> Recipe:
        return self.parts


# Configuration of the package -> overrides, our equivalent recipe, and evaluations per iteration.
PAIRS = {
    "invertinggradients": (
        [],
        Recipe(Cosine(), Adam(0.1, StepDecay(), signed=True), (TheirVariation(0.2),)),
        1,
    ),
    "seethroughgradients": (
        ["optim.langevin_noise=0", "optim.warmup=0"],
        Recipe(SquaredL2(0.5e-4), Adam(0.1, CosineDecay()), (TheirVariation(1e-4), SmallNorm(1e-6))),
        1,
    ),
    "_default_optimization_attack": (
        ["optim.optimizer=l-bfgs"],
        Recipe(SquaredL2(0.5), LBFGS(1.0), clamps_pixels=False),
        20,
    ),
}


@pytest.mark.parametrize("config", list(PAIRS))
def test_the_objective_is_equal_at_every_step(config: str, monkeypatch) -> None:
    overrides, recipe, evaluations = PAIRS[config]
    observation, _ = view(small_vit())
    iterations = STEPS // evaluations
    theirs = prepare_attack(observation, config, [f"optim.max_iterations={iterations}", *overrides])
    kept = []
    run = engine.minimise

    def keeping(*arguments, **options):
        kept.append(run(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr("attacks.gradient_matching.attack.minimise", keeping)
    Composed(parts=recipe, steps=STEPS)([observation])
    start = torch.randn(1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0))[0]
    _, values = theirs.run(start)
    ours = kept[0].trace[::evaluations, 0, 0].tolist()
    assert len(values) == len(ours) == iterations
    assert values[-1] < values[0]
    # Signs and curvatures amplify round-off: the first steps agree almost exactly, the others approximately.
    assert ours[:5] == pytest.approx(values[:5], rel=1e-3)
    assert ours == pytest.approx(values, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ours", "options", "theirs"),
    [
        ("inverting_gradients", {}, "breaching_inverting_gradients"),
        ("see_through_gradients", {}, "breaching_see_through_gradients"),
    ],
)
def test_our_reconstruction_is_not_worse(ours: str, options: dict, theirs: str) -> None:
    model = small_vit()
    cases = [view(model, first) for first in range(4)]
    mean = {
        name: fmean(psnr(attack(name, o, steps=100, **extra), images) for o, images in cases)
        for name, extra in ((ours, options), (theirs, {}))
    }
    assert mean[ours] > mean[theirs] - 0.5, mean


def test_the_package_attacks_return_repeatable_reconstructions() -> None:
    observation, images = view(small_vit())
    names = [name for name in ATTACKS if name.startswith("breaching_")]
    assert len(names) == 4
    for name in names:
        options = {} if name == "breaching_april" else {"steps": 2}
        found = attack(name, observation, **options)
        again = attack(name, observation, **options)
        assert found.diagnosis == ""
        assert found.images.shape == images.shape
        assert torch.equal(found.images, again.images)


def test_unsupported_updates_get_a_diagnosis() -> None:
    observation, _ = view(small_vit(), kind="weights", local_steps=3, learning_rate=0.1)
    assert "one step only" in attack("breaching_inverting_gradients", observation, steps=1).diagnosis
    without, _ = view(small_vit())
    del without.gradients["pos_embed"]
    assert "no pos_embed" in attack("breaching_april", without).diagnosis


def test_masked_positions_are_passed_to_the_package() -> None:
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 3:8] = True
    observation, _ = view(small_vit(masked=True), mask=mask)
    theirs = prepare_attack(observation, "invertinggradients", ["optim.max_iterations=1"])
    assert torch.equal(theirs.payload[0]["parameters"][0], observation.model.cls_token)
    assert theirs.attacker.model_template.forward_kwargs["position_mask"][0].tolist() == mask[0].tolist()
