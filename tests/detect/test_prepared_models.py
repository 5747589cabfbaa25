"""Prepared models that benchmarks/detect.py does not train with, in a client's first round: each must alarm."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS
from attacks.active.base import ActiveAttack
from fedmjp.detect import Detector, received_by
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before

SHAPE = (3, 32, 32)
ALARMS = [
    ("fishing", {"local_steps": "sgd"}, 0, "bias_range"),
    ("fishing", {"local_steps": "adamw"}, 0, "bias_range"),
    ("fishing", {"single_out": True}, 1, "bias_range"),  # what the others of a sum are sent
    ("imprint", {}, 0, "bins"),
]


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=10, weights="auto")


@pytest.mark.parametrize(("name", "settings", "place", "statistic"), ALARMS)
def test_a_prepared_model_alarms_without_an_earlier_one(trained, name, settings, place, statistic) -> None:
    attack: ActiveAttack = ATTACKS.get(name)(**settings)
    sending = attack.sent_to(before(trained, SHAPE), place)
    report = Detector().inspect(received_by(sending.model(trained.module, SHAPE), torch.zeros(1, *SHAPE)))
    assert report.suspicious
    assert statistic in report.reason
