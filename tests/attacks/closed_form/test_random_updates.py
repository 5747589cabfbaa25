"""A finite update that is no image's: where the equations cannot contradict it, nothing may be vouched for."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS, Observation
from fedmjp.models import build_model


@pytest.mark.parametrize("name", ["vit_micro_32", "vit_mini_32"])  # more patches than channels, and fewer
def test_nothing_of_random_numbers_is_vouched_for(name: str) -> None:
    built = build_model(name, num_classes=10, weights="random", seed=0)
    generator = torch.Generator().manual_seed(0)
    update = {n: torch.randn(p.shape, generator=generator) for n, p in built.module.named_parameters()}
    observation = Observation(update, built.module, 1, (3, 32, 32), built.mean, built.std)
    found = ATTACKS.get("patch_embedding")()([observation])
    assert found.diagnosis
    assert not found.known.any()
