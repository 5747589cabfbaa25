"""Soteria against a Jacobian by central differences and a gradient written out by hand, both in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS, UsageError
from attacks.certificate import certify, certify_encoder
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.defenses.chain import read_defense
from fedmjp.defenses.soteria import jacobian_norms, pruned_entries
from fedmjp.defenses.step import LocalStep, local_step
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.classifier import recorded_calls
from fedmjp.objectives import OBJECTIVES, client_loss
from tests.conftest import photographs
from tests.defenses.clients import task_under, update_under, weights_of

LABELS = torch.tensor([3, 1])


@pytest.fixture(scope="module")
def tiny() -> BuiltModel:
    model = build_model("vit_micro16_32", num_classes=8, weights="random")
    model.module.double().eval()
    return model


def step_of(model: BuiltModel, images: Tensor, labels: Tensor = LABELS) -> LocalStep:
    def loss_of(views: tuple[ClientInput, ...], labels: Tensor) -> Tensor:
        return client_loss(model, views[0].images, labels, None, {})

    return local_step(model, lambda name: False, (ClientInput(images),), labels, loss_of)


@torch.no_grad()
def features_of(model: BuiltModel, images: Tensor) -> Tensor:
    return model.module.forward_head(model.module.forward_features(model.normalise(images)), pre_logits=True)


def test_the_jacobian_is_that_of_central_differences(tiny) -> None:
    """Of every pixel in turn; steps of 1e-4 in units of the normalised image."""
    images, step = photographs(32, 2).double(), 1e-4
    deviations = torch.tensor(tiny.std, dtype=torch.float64)
    squares = torch.zeros(2, tiny.module.embed_dim, dtype=torch.float64)
    for b in range(2):
        for channel in range(3):
            shifts = torch.eye(1024, dtype=torch.float64).view(-1, 32, 32) * step * deviations[channel]
            ends = []
            for sign in (1, -1):
                moved = images[b].repeat(1024, 1, 1, 1)
                moved[:, channel] += sign * shifts
                ends.append(features_of(tiny, moved))
            squares[b] += ((ends[0] - ends[1]) / (2 * step)).square().sum(dim=0)
    images.requires_grad_()
    with recorded_calls(tiny.module.head) as calls:
        tiny.module(tiny.normalise(images))
    torch.testing.assert_close(jacobian_norms(calls[0][0], images, deviations), squares.sqrt(), rtol=1e-5, atol=0)


def test_only_the_classifiers_weight_changes_as_by_hand(tiny) -> None:
    """dL/dW = mean over images of (p - y) r'^T, r' without its most explained entries, image by image."""
    images = photographs(32, 2).double()
    plain = step_of(tiny, images).gradients()
    sent = DEFENSES.get("soteria")(pruned_features=0.75).gradients(step_of(tiny, images), torch.Generator())
    assert list(sent) == list(plain)
    features = features_of(tiny, images)
    expected = torch.zeros_like(plain["head.weight"])
    for b in range(2):
        own = images[b : b + 1].clone().requires_grad_()
        with recorded_calls(tiny.module.head) as calls:
            logits = tiny.module(tiny.normalise(own))[0]
        ratios = []
        for i in range(64):
            (slope,) = torch.autograd.grad(calls[0][0][0, i], own, retain_graph=True)
            ratios.append(
                float(sum((slope[0, c] * tiny.std[c]).square().sum() for c in range(3)) ** 0.5 / features[b, i].abs())
            )
        least = sorted(range(64), key=lambda i: ratios[i])[:48]
        perturbed = features[b].clone()
        perturbed[least] = 0
        error = logits.detach().softmax(0) - torch.eye(8, dtype=torch.float64)[LABELS[b]]
        expected += torch.outer(error, perturbed) / 2
    torch.testing.assert_close(sent["head.weight"], expected)
    for name in set(plain) - {"head.weight"}:
        torch.testing.assert_close(sent[name], plain[name])


def test_what_is_pruned_has_the_least_slope_for_its_size() -> None:
    features, slopes = torch.tensor([[4.0, -8.0, 1.0, 0.5]]), torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    assert pruned_entries(features, slopes, 0.5).tolist() == [[True, True, False, False]]
    assert not pruned_entries(features, slopes, 0.0).any()


@pytest.mark.parametrize("attack", ["patch_embedding", "token_span"])
def test_attacks_that_leave_the_classifier_out_recover_the_photograph(attack: str) -> None:
    update = update_under("soteria")
    found = update.attacked(attack)
    assert float(psnr(found.images, update.original)) > 60
    assert found.certified
    assert "classifier_left_out" in found.flags


def test_the_certificate_says_what_it_compares() -> None:
    """Over all gradients the answer does not agree, over the encoder's it does; a wrong image in neither way."""
    update = update_under("soteria")
    found = update.attacked("patch_embedding")
    assert certify(update.view, found)[1] > 1e-2
    assert certify_encoder(update.view, found)[0]
    wrong = found.images.clone()
    wrong[..., :8, :8] = 1 - wrong[..., :8, :8]
    sure, residual = certify_encoder(update.view, dataclasses.replace(found, images=wrong))
    assert not sure
    assert residual > 1e-2


def test_gradient_matching_can_leave_the_classifier_out() -> None:
    """At the photograph itself nothing is left to match without the perturbed layer."""
    view = update_under("soteria", "vit_micro8_32").view
    start = {"init": "patch_embedding", "steps": 1}
    every, others = (
        ATTACKS.get("idlg")(**start, leave_out=names)([view]).details["start_loss"] for names in ("", "head.weight")
    )
    assert others < 1e-6 * every
    missing = ATTACKS.get("idlg")(**start, leave_out="classifier.")([view])
    assert "no parameter's name begins with 'classifier.'" in missing.diagnosis


def test_attacks_on_mjp_are_as_good_in_a_chain_with_it() -> None:
    alone, chained = (
        update_under(entry).attacked("mjp_subspace") for entry in ("mjp:gamma=0.1", "mjp:gamma=0.1+soteria")
    )
    torch.testing.assert_close(chained.images, alone.images, atol=0.01, rtol=0)
    assert "mjp_subspace" in read_defense("mjp:gamma=0.1+soteria").known_by


def test_it_acts_in_chains_and_on_batches() -> None:
    """The noise comes after the perturbation: without noise both are the same update."""
    chained, alone = (
        task_under(entry, "vit_micro8_32", 2) for entry in ("soteria+noise:clip_norm=1e9,noise_multiplier=0", "soteria")
    )
    weights = weights_of(alone)
    sent, expected = (task.update(0, 1, weights).tensors for task in (chained, alone))
    assert all(torch.equal(sent[name], expected[name]) for name in expected)
    both = set(DEFENSES.get("soteria").known_by) & set(DEFENSES.get("noise").known_by)
    assert set(read_defense("soteria+noise").known_by) == both


def test_activations_of_half_precision() -> None:
    """As central training computes them: without the whole representation nothing is left, to bfloat16's precision."""
    model, images = build_model("vit_micro16_32", num_classes=8, weights="random"), photographs(32, 2)
    plain, step = step_of(model, images).gradients(), step_of(model, images)
    exact = step.loss_of

    def loss_of(views: tuple[ClientInput, ...], labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return exact(views, labels)

    step.loss_of = loss_of
    found = DEFENSES.get("soteria")(pruned_features=1.0).gradients(step, torch.Generator())
    assert float(found["head.weight"].abs().max()) < 0.02 * float(plain["head.weight"].abs().max())
    torch.testing.assert_close(found["head.bias"], plain["head.bias"], rtol=0.05, atol=0.01)


def test_what_it_cannot_act_on() -> None:
    with pytest.raises(UsageError, match=r"--pruned-features must lie in \[0, 1\], not 1.5"):
        DEFENSES.get("soteria")(pruned_features=1.5).validate()
    model = build_model("vit_micro16_32", num_classes=8, weights="random")
    model.module.reset_classifier(0)
    with pytest.raises(UsageError, match="soteria acts in front of a linear classifier, and this model has none"):
        DEFENSES.get("soteria")().gradients(step_of(model, photographs(32, 2)), torch.Generator())


@pytest.mark.parametrize("objective", ["mp3", "segmentation"])
def test_objectives_without_a_classifier_are_refused_before_the_start(objective: str) -> None:
    """Alone and in a chain, from the options alone; the supervised one is not refused."""
    for entry in ("soteria", "noise+soteria"):
        with pytest.raises(UsageError, match="this --objective trains no classifier of images; pass --objective sup"):
            read_defense(entry).check(OBJECTIVES.get(objective)(), None)
        read_defense(entry).check(OBJECTIVES.get("supervised")(), None)
