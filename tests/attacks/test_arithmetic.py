"""Attacks compute in full float32 whatever the process around them has set, and leave its settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from attacks import Attack, Observation, Reconstruction
from attacks.arithmetic import exact_arithmetic, use_exact_arithmetic


@pytest.fixture
def coarse():
    """A process that multiplies in fewer digits where its hardware can."""
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    yield
    use_exact_arithmetic()


def test_the_block_is_exact_and_restores(coarse) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 200, generator=generator) for _ in range(2))
    with exact_arithmetic():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        assert (a @ b - a.double() @ b.double()).abs().max() < 1e-3  # bfloat16 products are off by 0.1
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@dataclass(frozen=True, kw_only=True)
class Noting(Attack):
    """Answers with the precision that it finds."""

    def misfit(self, observations: Sequence[Observation]) -> str:
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        return Reconstruction(None, diagnosis=torch.get_float32_matmul_precision())


def test_attacks_run_in_it(coarse) -> None:
    model = torch.nn.Linear(2, 2)
    gradients = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    observation = Observation(gradients, model, 1, (3, 8, 8), (0.5,) * 3, (0.5,) * 3)
    assert Noting()([observation]).diagnosis == "highest"
    assert torch.get_float32_matmul_precision() == "medium"
