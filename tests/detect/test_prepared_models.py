"""Prepared models in a client's first round, by their weights alone; and classifiers of zeros, with a batch.

A classifier of zeros may be an honest start or silence a client. The tests say what tells them apart, and what cannot.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attacks import ATTACKS
from attacks.active.base import ActiveAttack
from fedmjp.detect import Detector, Received, received_by
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.conftest import photographs

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


def changed(model: BuiltModel, **values: float) -> nn.Module:
    """A copy with every parameter whose name begins with a key (`_` for `.`) at that number."""
    module = copy.deepcopy(model.module).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            for start, value in values.items():
                if name.replace(".", "_").startswith(start):
                    parameter.fill_(value)
    return module


def received(module: nn.Module, previous: nn.Module | None = None) -> Received:
    """By a client with four photographs."""
    last = None if previous is None else {name: value.detach() for name, value in previous.named_parameters()}
    return received_by(module, photographs(32, 4), torch.tensor([3, 0, 3, 7]), previous=last)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"": 0.0}, "dead_rows 1"),  # what `single_out` sends, with a bias of zero as well
        ({"": 0.0}, "silent_images 1"),
        ({"head": 0.0, "norm": 0.0}, "silent_images 1"),  # layers below that look honest, and no features
        ({"head": 0.0, "norm_weight": 0.0, "norm_bias": 0.5}, "silent_images 1"),  # the same features for every image
    ],
)
def test_zeros_that_no_honest_start_has_alarm_in_a_first_round(trained, values, reason) -> None:
    report = Detector().inspect(received(changed(trained, **values)))
    assert reason in report.reason


def test_a_classifier_that_starts_at_zero_is_pointed_out_and_not_refused(trained) -> None:
    """It silences every image below it, as an attack would: the client is warned, because nothing tells them apart."""
    start = received(changed(trained, head=0.0))
    report = Detector().inspect(start)
    assert not start.images.below.any()
    assert start.images.classifier.all()
    assert not report.suspicious
    (warning,) = report.warnings
    assert warning.startswith("the classifier head is zero in the first model that the client was sent")
    assert Detector().inspect(received(changed(trained))).warnings == ()


def test_features_are_those_that_the_classifier_reads(trained) -> None:
    module, read = changed(trained), []
    module.head.register_forward_hook(lambda layer, inputs, output: read.append(inputs[0].detach()))
    with torch.no_grad():
        module(photographs(32, 4))
    own = read[0].double()
    torch.testing.assert_close(received(changed(trained)).images.features, own, rtol=1e-4, atol=1e-5)


def test_a_classifier_of_zeros_alarms_where_training_would_have_moved_it(trained) -> None:
    zero, public = changed(trained, head=0.0), changed(trained)
    again = Detector().inspect(received(zero, zero))
    assert "dead_rows 1" in again.reason
    assert "silent_images 1" in again.reason
    assert again.warnings == ()
    # The model that everybody can download, where a client knows it, in place of the last one.
    assert "row_norms 1" in Detector().inspect(received(zero, public)).reason


def test_rows_that_were_zero_give_no_scale_of_a_change(trained) -> None:
    report = Detector().inspect(received(changed(trained), changed(trained, head=0.0)))
    assert not report.suspicious
    assert report.not_stated["row_norms"] == "head was zero before, which gives no scale"
