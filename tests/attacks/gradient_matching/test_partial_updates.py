"""Matching what a client really computed and sent: kept entries alone, and gradients under dropout on average."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_vit import CLASSES, attack, psnr, small_vit, view
from torch import Tensor

from attacks import ATTACKS, Observation, UsageError
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.labels import infer_one_label, infer_sparse_label
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import math_attention
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.models.vit import drop_activations, skip_blocks
from fedmjp.objectives import client_loss
from tests.conftest import observe, photographs


def sparse(observation: Observation, share: float) -> Observation:
    """The update after a random mask."""
    topk = DEFENSES.get("topk")(topk_share=share, topk_choice="random")
    sent = topk.on_update(dict(observation.gradients), torch.Generator().manual_seed(3))
    return dataclasses.replace(observation, gradients=sent)


def test_only_sent_entries_are_matched() -> None:
    """What stands at the other places of a simulated gradient changes nothing."""
    received = torch.tensor([[1.0, 0.0, -2.0, 0.0]])
    target = Target.of({"a": received}).of_sent()
    found = torch.tensor([[3.0, 4.0, 5.0, 6.0]])
    assert target.matched({"a": found})["a"].tolist() == [[3.0, 0.0, 5.0, 0.0]]
    assert Target.of({"a": received}).matched({"a": found})["a"] is found


@pytest.mark.long
def test_a_tenth_of_the_entries_gives_the_photograph_where_only_they_are_matched() -> None:
    """On the scaled ViT: taken for a whole gradient the same message leads the same search away from the image."""
    observation, images = view(small_vit())
    message = sparse(observation, 0.1)
    found, misled = (attack("inverting_gradients", message, steps=80, tv=0.01, sent_only=x) for x in (True, False))
    assert psnr(found, images) > 15
    assert psnr(misled, images) < psnr(found, images) - 2


def test_the_label_of_a_sparse_update() -> None:
    """Of gradients written out by hand, where the bias' entry of the label was not sent, and where it was."""
    generator = torch.Generator().manual_seed(0)
    for label in range(CLASSES):
        probabilities = (torch.randn(CLASSES, generator=generator) * 2).softmax(dim=0)
        error = probabilities - torch.eye(CLASSES)[label]
        weight = torch.outer(error, torch.randn(64, generator=generator))
        kept = torch.rand(weight.shape, generator=generator) < 0.3
        without = error.clone()
        without[[label, (label + 1) % CLASSES]] = 0
        assert infer_sparse_label(weight * kept, without).tolist() == [label]
        assert infer_sparse_label(torch.zeros_like(weight), error).tolist() == [label]


@pytest.mark.parametrize("drop", [lambda m: drop_activations(m, 0.1), lambda m: skip_blocks(m, 0.5)])
def test_gradients_under_masks_are_means_of_a_clients_own(drop) -> None:
    """Against a client in training mode that draws the same random numbers, one mask after the other."""
    model = small_vit()
    drop(model.module)
    observation, images = view(model)
    update = extract_matched_update(observation)
    simulation, _ = build_simulation(observation, [update], 1, mask_draws=3, seed=5)
    normalised = model.normalise(images)[None].requires_grad_()
    with math_attention():
        found = simulation.gradients(normalised, torch.tensor([[1]]))
        again = simulation.gradients(normalised, torch.tensor([[1]]))
        own = clients_mean(model, images, simulation.names, seed=int(torch.randint(2**62, (), generator=seeded(5))))
    assert not simulation.model.training
    for name, gradient in found.items():
        torch.testing.assert_close(gradient[0], own[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(found[name], again[name]) for name in found)  # every evaluation draws other masks
    (slope,) = torch.autograd.grad(sum(g.square().sum() for g in found.values()), normalised)
    assert float(slope.norm()) > 0


def seeded(seed: int) -> torch.Generator:
    """The generator that a simulation draws its seeds from."""
    return torch.Generator().manual_seed(seed)


def clients_mean(model, images: Tensor, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Mean gradient of three steps of one client in training mode, each with masks of its own."""
    module, total = model.module.train(), dict.fromkeys(names, 0.0)
    parameters = dict(module.named_parameters())
    torch.manual_seed(seed)
    for _ in range(3):
        loss = client_loss(model, images, torch.tensor([1]), None, {})
        found = torch.autograd.grad(loss, [parameters[name] for name in names])
        total = {name: total[name] + g / 3 for name, g in zip(names, found, strict=True)}
    module.eval()
    return total


def test_what_cannot_be_averaged() -> None:
    observation, _ = view(small_vit())
    assert "no layer of the model drops anything in training" in attack("idlg", observation, mask_draws=2).diagnosis
    with pytest.raises(UsageError, match="mask_draws must not be negative, but is -1"):
        ATTACKS.get("idlg")(mask_draws=-1).validate()


@pytest.mark.parametrize("label", [0, 3, 7])
def test_the_label_shows_without_the_bias_of_the_classifier(label: int) -> None:
    """Frozen, so that zeros or nothing is sent; also where its weight's rows are all that is left."""
    built = build_model("vit_micro_32", num_classes=8, weights="random")
    view = observe(built, photographs(32, 1), torch.tensor([label]))
    sent = {n: g for n, g in view.gradients.items() if n != "head.bias"}
    assert infer_one_label(sent, "head").tolist() == [label]
    assert infer_one_label(view.gradients, "head").tolist() == [label]
    with pytest.raises(UsageError, match="no gradient of the classifier's bias"):
        infer_one_label({n: g for n, g in sent.items() if n != "head.weight"}, "head")
