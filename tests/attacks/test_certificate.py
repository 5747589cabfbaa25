"""Only answers that reproduce the update are certified, and those are right."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from attacks import ATTACKS, Reconstruction
from attacks.certificate import certify, certify_encoder, reproduce
from fedmjp.metrics import patch_recovery
from fedmjp.models import build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed, with_dal
from tests.conftest import observe, photographs


def test_the_original_is_certified_and_a_slightly_wrong_one_is_not(mini) -> None:
    images = photographs(64, 1)
    view = observe(mini, images)
    assert certify(view, Reconstruction(images))[0]
    wrong = images.clone()
    wrong[..., :8, :8] = 1 - wrong[..., :8, :8]  # one patch of 64
    sure, residual = certify(view, Reconstruction(wrong))
    assert not sure
    assert residual > 1e-2


def test_labels_are_read_from_the_classifier_among_biases_of_its_length() -> None:
    model = build_model("vit_micro8_32", num_classes=64, weights="random")  # 64 channels
    view, image = observe(model, photographs(32, 1), torch.tensor([9])), photographs(32, 1)
    assert certify(dataclasses.replace(view, labels=None), Reconstruction(image))[0]


def test_the_residual_is_the_difference_of_gradients(mini) -> None:
    images = photographs(64, 2)
    view, other = (observe(mini, image[None], torch.zeros(1, dtype=torch.int64)) for image in images)
    _, residual = certify(view, Reconstruction(images[1:]))
    names = [n for n in view.gradients if n != "pos_embed"]
    difference, size = (
        torch.cat([(view.gradients[n] - x * other.gradients[n]).flatten() for n in names]).norm() for x in (1, 0)
    )
    assert residual == pytest.approx(float(difference / size), rel=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_small_batches_in_any_order_of_their_labels(mini, count: int) -> None:
    images = photographs(64, count)
    view = observe(mini, images, torch.tensor([3, 1, 5][:count]))
    assert certify(view, Reconstruction(images))[0]
    assert not certify(view, Reconstruction(photographs(64, count + 1)[1:]))[0]


@pytest.mark.parametrize("view_of", [lambda m, i: jigsawed(m, i, 0.3), lambda m, i: with_dal(m, i, 0.01)])
def test_masked_jigsawed_updates_with_a_localisation_loss(view_of) -> None:
    model, image = build_model("vit_mini_64_mjp", num_classes=8, weights="random"), photographs(64, 1)
    assert certify(view_of(model, image), Reconstruction(image))[0]
    assert not certify(view_of(model, image), Reconstruction(image.flip(3)))[0]


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_encoder_is_certified_whatever_the_loss_on_its_output_was(pool: str) -> None:
    """Smoothed labels, which the certificate of the whole model does not know; class token and mean of the tokens."""
    model, image = build_model("vit_mini_64", num_classes=8, weights="random"), photographs(64, 2)
    model.module.global_pool = pool
    labels = torch.full((1, 8), 0.05)
    labels[0, 3] = 0.65
    view = observe(model, image[:1], labels)
    assert not certify(view, Reconstruction(image[:1]))[0]
    sure, residual = certify_encoder(view, Reconstruction(image[:1]))
    assert sure
    assert residual < 1e-4
    for wrong in (image[1:], image[:1].flip(3)):
        sure, residual = certify_encoder(view, Reconstruction(wrong))
        assert not sure
        assert residual > 2e-2


def test_the_encoder_of_a_batch_is_not_compared_alone(mini) -> None:
    images = photographs(64, 2)
    assert not certify_encoder(observe(mini, images), Reconstruction(images))[0]


def test_what_cannot_be_reproduced_is_not_certified(mini) -> None:
    images = photographs(64, 1)
    view = observe(mini, images)
    for changed in (
        dataclasses.replace(view, local_steps=2, kind="weights"),
        dataclasses.replace(view, num_examples=2),
        dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != "head.bias"}),
        dataclasses.replace(view, gradients={}),
    ):
        sure, residual = certify(changed, Reconstruction(images))
        assert not sure
        assert residual != residual
    assert certify(view, Reconstruction(None)) == (False, pytest.approx(float("nan"), nan_ok=True))


def test_the_model_is_left_as_it_was(mini) -> None:
    view = observe(mini, photographs(64, 1))
    before = {n: (p.requires_grad, p.grad) for n, p in mini.module.named_parameters()}
    certify(view, Reconstruction(photographs(64, 1)))
    assert {n: (p.requires_grad, p.grad) for n, p in mini.module.named_parameters()} == before


def test_certified_means_right() -> None:
    """Of MJP's clients over gammas and photographs, every certified answer has all patches above 25 dB."""
    model = build_model("vit_mini_64_mjp", num_classes=200, weights="auto")
    certified = wrong = 0
    for index, image in enumerate(photographs(64, 8)):
        for gamma in (0.05, 0.3):
            views = [jigsawed(model, image[None], gamma, seed=10 * index + t) for t in range(4)]
            for name, number in (("mjp_subspace", 1), ("mjp_rounds", 2), ("mjp_rounds", 4)):
                found = ATTACKS.get(name)()(views[-number:])
                if certify(views[-1], found)[0]:
                    certified += 1
                    wrong += float(patch_recovery(found.images, image[None], 8)) < 1
    assert certified >= 10
    assert wrong == 0


def test_a_batch_is_reproduced_up_to_a_factor(mini) -> None:
    images, labels = photographs(64, 5), torch.tensor([3, 1, 1, 0, 7])
    view = dataclasses.replace(observe(mini, images, labels), labels=labels)
    scaled = dataclasses.replace(view, gradients={n: 5 * g for n, g in view.gradients.items()})
    residual, factor = reproduce(scaled, images)
    assert residual < 1e-4
    assert factor == pytest.approx(5, rel=1e-4)
    assert reproduce(scaled, images.flip(0))[0] > 0.1
    assert math.isnan(reproduce(dataclasses.replace(scaled, labels=None), images)[0])  # too many orders to try
    assert reproduce(observe(mini, images[:1]), images[:1])[0] < 1e-4  # the label is inferred


@pytest.mark.parametrize("frozen", ["pos_embed", "blocks."])
def test_local_steps_leave_frozen_parameters_as_they_are(mini, frozen: str) -> None:
    """Four steps of a client that does not send what it does not train."""
    images, labels, rate = photographs(64, 1), torch.tensor([0]), 0.05
    client, total = copy.deepcopy(mini.module), {}
    for _ in range(4):
        gradients = observe(dataclasses.replace(mini, module=client), images).gradients
        gradients = {n: g for n, g in gradients.items() if not n.startswith(frozen)}
        total = {n: total.get(n, 0) + g for n, g in gradients.items()}
        with torch.no_grad():
            for name, gradient in gradients.items():
                client.get_parameter(name).sub_(rate * gradient)
    view = observe(mini, images, local_steps=4, kind="weights", learning_rate=rate, labels=labels)
    view = dataclasses.replace(view, gradients=total)
    assert certify(view, Reconstruction(images))[0]
    assert not certify(view, Reconstruction(images.flip(3)))[0]
