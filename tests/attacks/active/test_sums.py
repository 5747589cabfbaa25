"""One client out of a sum: the others are sent a model that keeps silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.memory import remember
from fedmjp.audit.observe import model_as_sent
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.attacks.active.contexts import before
from tests.conftest import observe, photographs

SHAPE = (3, 32, 32)
LABELS = torch.tensor([3, 0, 5, 3, 5, 5])  # of three clients with two images each


def summed(attack, built, images, labels, history: list[Observation]) -> tuple[Observation, list[Observation]]:
    """What the server sees of a sum of clients with two images, the first singled out, and what each one sends."""
    context = before(built, SHAPE, history)
    models = [model_as_sent(built.module, attack.sent_to(context, place).parameters) for place in (0, 1)]
    pairs = zip(images.split(2), labels.split(2), strict=True)
    each = [observe(replace(built, module=models[min(n, 1)]), *own) for n, own in enumerate(pairs)]
    total = {name: sum(one.gradients[name] for one in each) for name in each[0].gradients}
    return replace(each[0], gradients=total), each


def test_the_others_send_nothing_but_the_bias_in_float64() -> None:
    built, images = build_model("vit_micro_32", num_classes=10, weights="random"), photographs(32, 6).double()
    built.module.double()
    attack = ATTACKS.get("fishing")(target=3, single_out=True)
    total, each = summed(attack, built, images, LABELS, [])
    for name, gradient in total.gradients.items():
        if name != "head.bias":
            assert all(float(other.gradients[name].abs().max()) == 0 for other in each[1:]), name
            assert torch.equal(gradient, each[0].gradients[name])
    found = attack([total])
    # Of class 3 another client has one as well, and of class 5 both others: neither is counted.
    assert found.labels.tolist() == [0, 3]
    assert found.details["senders"] == 1


@pytest.mark.parametrize("name", ["fishing", "feature_fishing"])
def test_every_image_of_one_client_comes_back_out_of_a_sum(name: str) -> None:
    built, images = build_model("vit_mini_32", num_classes=10, weights="auto"), photographs(32, 6)
    attack, history, best = ATTACKS.get(name)(single_out=True), list[Observation](), torch.zeros(2)
    for _ in range(4):
        view, _ = summed(attack, built, images, LABELS, history)
        found = attack([*history, view])
        history.append(remember(view, attack.remembered_layers(view.model, SHAPE)))
        if found.images is not None:
            assert found.diagnosis == ""
            for one in found.images:
                best = best.maximum(psnr(one.expand(2, -1, -1, -1), images[:2]))
    assert best.min() > 60
