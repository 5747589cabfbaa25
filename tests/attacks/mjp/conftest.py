"""What the tests of attacks on MJP share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import Observation
from attacks.mjp.attended_tokens import Attended, AttendedSearch
from attacks.mjp.known_attention import PatchSweeps
from attacks.mjp.token_duals import Removed
from attacks.mjp.token_patches import PlacedPatches
from fedmjp.models import BuiltModel, build_model


def models_of_rounds(count: int) -> list[BuiltModel]:
    """Small MJP models in float64 with weights of their own, one a round: training goes on between updates."""
    built = [build_model("vit_mini_64_mjp", num_classes=8, weights="random", seed=s) for s in range(count)]
    for model in built:
        model.module.double()
    return built


@pytest.fixture(scope="package")
def models() -> list[BuiltModel]:
    """Those of four rounds."""
    return models_of_rounds(4)


def without(view: Observation, *names: str) -> Observation:
    """The update without these parameters."""
    return dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n not in names})


class Nothing(AttendedSearch):
    """No patch is found without the others' attention."""

    def __call__(self, sweeps: PatchSweeps, c: torch.Tensor, scales: torch.Tensor) -> Attended:
        nothing, places = sweeps.base[:0], torch.arange(0)
        return Attended(PlacedPatches.none(sweeps.known), Removed.of(sweeps.block, nothing), places, nothing)
