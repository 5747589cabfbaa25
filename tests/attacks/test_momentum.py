"""What a client's momentum adds to its updates is found and removed; the oracle is PyTorch's own optimiser."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.fingerprints import repair
from attacks.momentum import find_momentum, remove_momentum
from attacks.registry import UsageError
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs

RATE = 0.01


def sent(momentum: float, decay: float = 0.0, count: int = 3) -> tuple[list[Observation], torch.Tensor]:
    """The steps of a client that keeps its optimiser and takes one on each photograph."""
    model, images = build_model("vit_mini_32", num_classes=8, weights="auto"), photographs(32, count)
    optimiser = torch.optim.SGD(model.module.parameters(), lr=RATE, momentum=momentum, weight_decay=decay)
    found = []
    for number, image in enumerate(images):
        received = copy.deepcopy(model.module)
        view = observe(dataclasses.replace(model, module=received), image[None], torch.tensor([number]))
        for name, parameter in model.module.named_parameters():
            parameter.grad = view.gradients[name].clone()
        optimiser.step()
        steps = {n: optimiser.state[p].get("momentum_buffer") for n, p in model.module.named_parameters()}
        steps = {n: view.gradients[n] if step is None else step.clone() for n, step in steps.items()}
        found.append(dataclasses.replace(view, gradients=steps, round=number))
    return found, images


def test_momentum_is_found_and_removed() -> None:
    updates, images = sent(0.9)
    assert find_momentum(*updates[:2]) == pytest.approx(0.9, abs=1e-3)
    attack = ATTACKS.get("patch_embedding")()
    mixed = float(psnr(attack(updates).images, images[-1:]))
    clean = float(psnr(attack(remove_momentum(updates, 0.9)).images, images[-1:]))
    assert clean > 60
    assert clean > mixed + 20


def test_momentum_and_weight_decay_together() -> None:
    updates, images = sent(0.9, decay=0.01)
    clean, found = repair(remove_momentum(updates, 0.9)[-1])
    assert "weight_decay" in {finding.name for finding in found}
    assert float(psnr(ATTACKS.get("patch_embedding")()([clean]).images, images[-1:])) > 50


def test_a_client_without_momentum_shows_none() -> None:
    updates, _ = sent(0.0, count=2)
    assert find_momentum(*updates) is None
    same = remove_momentum(updates, 0.0)
    assert all(
        torch.equal(a.gradients[n], g) for a, b in zip(same, updates, strict=True) for n, g in b.gradients.items()
    )


def test_what_cannot_be_removed() -> None:
    updates, _ = sent(0.0, count=1)
    with pytest.raises(UsageError, match="outside"):
        remove_momentum(updates, 1.0)
    with pytest.raises(UsageError, match="one local step"):
        remove_momentum([dataclasses.replace(updates[0], local_steps=2)], 0.9)
