"""What a client's momentum adds to its updates is found and removed; the oracle is PyTorch's own optimiser."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.momentum import KeptMomentum, find_momentum
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


def removed(updates: list[Observation], coefficient: float | None, decay: float = 0.0) -> tuple:
    """The last update and what was found of it, after all have passed in order."""
    kept = KeptMomentum(coefficient)
    for raw in updates:
        weights = {n: p.detach() for n, p in raw.model.named_parameters()}
        plain = {n: g - decay * weights[n] for n, g in raw.gradients.items()}
        found = kept(raw, dataclasses.replace(raw, gradients=plain))
    return found


def attacked(update: Observation, images: torch.Tensor) -> float:
    """PSNR of the last image's reconstruction."""
    return float(psnr(ATTACKS.get("patch_embedding")()([update]).images, images[-1:]))


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_known_momentum_is_removed(decay: float) -> None:
    updates, images = sent(0.9, decay)
    clean, found = removed(updates, 0.9, decay)
    assert (found.name, found.fixed) == ("momentum", True)
    assert attacked(clean, images) > max(60 if not decay else 50, attacked(updates[-1], images) + 20)


def test_unknown_momentum_is_named_and_hinders() -> None:
    updates, images = sent(0.9)
    assert find_momentum(*updates[:2]) == pytest.approx(0.9, abs=1e-3)
    same, found = removed(updates, None)
    assert same.gradients is not updates[-1].gradients
    assert attacked(same, images) < 30
    assert found.hinders
    assert "pass momentum=0.9" in found.sentence


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.9])
def test_a_client_that_keeps_none_is_left_alone(coefficient: float | None) -> None:
    """Its optimiser has momentum, but starts anew in every round."""
    updates, images = sent(0.0)
    same, found = removed(updates, coefficient)
    assert found is None
    assert attacked(same, images) > 60


def test_where_it_does_not_show_nothing_is_removed() -> None:
    updates, _ = sent(0.9)
    kept = {n: g for n, g in updates[0].gradients.items() if not n.startswith("head")}
    blind = [dataclasses.replace(u, gradients={n: u.gradients[n] for n in kept}) for u in updates]
    same, found = removed(blind, 0.9)
    assert all(torch.equal(g, blind[-1].gradients[n]) for n, g in same.gradients.items())
    assert "does not show" in found.sentence
    several = [dataclasses.replace(u, local_steps=2) for u in updates]
    assert removed(several, 0.9)[1] is None
    with pytest.raises(UsageError, match="outside"):
        KeptMomentum(1.0)
