"""Fishing that changes less than it could: what is sent, what comes back of a batch, mistakes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, UsageError
from fedmjp.audit.observe import model_as_sent
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.attacks.contract import psnr
from tests.conftest import observe, photographs

LABELS = torch.tensor([3, 0, 5, 6])
TARGET = 5


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=10, weights="auto")


def sent_by(built: BuiltModel, strength: float) -> nn.Module:
    attack = ATTACKS.get("fishing")(target=TARGET, strength=strength)
    return model_as_sent(built.module, attack.send(before(built.module, (3, 32, 32))).parameters)


def test_the_classifier_lies_on_the_way(trained: BuiltModel) -> None:
    head, found = trained.module.head, sent_by(trained, 0.75).head
    for row in range(10):
        factor = 1.0 if row == TARGET else 0.25
        torch.testing.assert_close(found.weight[row], factor * head.weight[row])
        if row != TARGET:
            assert found.bias[row] == head.bias[row]
    lowest = min(float(found.bias[row].detach()) for row in range(10) if row != TARGET)
    assert lowest - float(found.bias[TARGET].detach()) == pytest.approx(math.log(4), abs=1e-5)
    others = {n: p for n, p in trained.module.named_parameters() if not n.startswith("head.")}
    sent = dict(sent_by(trained, 0.75).named_parameters())
    assert all(torch.equal(sent[name], value) for name, value in others.items())


def shares(built: BuiltModel, module: nn.Module, images: Tensor) -> list[float]:
    """The oracle: norms of each image's own gradient at the patch projection."""
    found = []
    for image, label in zip(images, LABELS, strict=True):
        loss = functional.cross_entropy(module(built.normalise(image[None])), label[None])
        found.append(float(torch.autograd.grad(loss, module.patch_embed.proj.weight)[0].norm()))
    return found


def test_the_weaker_the_more_the_others_send_and_the_less_comes_back(trained: BuiltModel) -> None:
    images, others, scores = photographs(32, 4), [], []
    for strength in (1.0, 0.9999, 0.9):
        module = sent_by(trained, strength)
        sent = shares(trained, module, images)
        others.append(max(sent[i] for i in (0, 1, 3)) / sent[2])
        attack = ATTACKS.get("fishing")(target=TARGET, strength=strength)
        found = attack([observe(replace(trained, module=module), images, LABELS)])
        scores.append(psnr(found, images[2:3]))
        assert ("sends a share" in found.diagnosis) == (strength < 1)
        assert bool(found.known.any()) == (strength == 1)
    assert others[0] == 0.0
    assert 0 < others[1] < 1e-2 < others[2]
    assert scores[0] > 80
    assert scores[0] > scores[1] > 30
    assert scores[2] < 25


def test_mistakes_are_one_line(trained: BuiltModel) -> None:
    kind = ATTACKS.get("fishing")
    with pytest.raises(UsageError, match=r"fishing.strength must lie in \(0, 1\], not 0"):
        kind(target=1, strength=0)
    with pytest.raises(UsageError, match="pass fishing.target"):
        kind(strength=0.5)
    view = observe(trained, photographs(32, 2), LABELS[:2])
    assert "not prepared for class 1 at this strength" in kind(target=1, strength=0.5)([view]).diagnosis
