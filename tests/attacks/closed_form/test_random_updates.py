"""A finite update that is no image's: where its own gradients contradict one another, nothing may be vouched for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.mark.parametrize("name", ["vit_micro_32", "vit_mini_32"])  # more patches than channels, and fewer
def test_nothing_of_random_numbers_is_vouched_for(name: str) -> None:
    built = build_model(name, num_classes=10, weights="random", seed=0)
    generator = torch.Generator().manual_seed(0)
    update = {n: torch.randn(p.shape, generator=generator) for n, p in built.module.named_parameters()}
    observation = Observation(update, built.module, 1, (3, 32, 32), built.mean, built.std)
    found = ATTACKS.get("patch_embedding")()([observation])
    assert found.diagnosis
    assert not found.known.any()


@pytest.mark.parametrize("lie", [-1.0, 0.5, 1e20])
def test_position_rows_of_another_scale_or_sign_are_noticed(lie: float) -> None:
    """The solve has more equations than unknowns, all fulfilled by a wrong image: the bias' gradient tells."""
    built = build_model("vit_mini_32", num_classes=8, weights="random")
    honest = observe(built, photographs(32, 1))
    attack = ATTACKS.get("patch_embedding")()
    assert attack([honest]).known.all()
    gradients = {**honest.gradients, "pos_embed": lie * honest.gradients["pos_embed"]}
    found = attack([dataclasses.replace(honest, gradients=gradients)])
    assert "miss the projection bias' gradient" in found.diagnosis
    assert not found.known.any()
