"""What the tests of attacks on MJP share."""

from __future__ import annotations

import pytest

from fedmjp.models import BuiltModel, build_model


@pytest.fixture(scope="package")
def models() -> list[BuiltModel]:
    """Four small MJP models in float64 with weights of their own: one a round."""
    built = [build_model("vit_mini_64_mjp", num_classes=8, weights="random", seed=s) for s in range(4)]
    for model in built:
        model.module.double()
    return built
