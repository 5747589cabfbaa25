"""The classifier's gradient shows how many gradients were summed, and for one image at which scale."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, Observation
from attacks.classifier import classifier_of, find_classifier, read_step
from attacks.fingerprints import recognise, repair
from attacks.tokenizer import logits_of
from fedmjp.metrics import psnr
from tests.attacks.models import timm_vit
from tests.attacks.test_fingerprints import HALF, MODELS, changed, honest
from tests.conftest import photographs

RATE = 0.1


def narrow_vit(classes: int = 5) -> nn.Module:
    """64 patches in 48 channels: closed forms have no equation left to check themselves by."""
    return timm.models.VisionTransformer(32, 4, embed_dim=48, depth=2, num_heads=2, num_classes=classes)


def after_steps(batches: Sequence[tuple[list[int], list[int]]], stated: float = RATE, make=timm_vit) -> Observation:
    """Weights after SGD at `RATE` on (images, labels) by number, taken for one step on one image at rate `stated`."""
    torch.manual_seed(0)
    model = make()
    twin, images = copy.deepcopy(model), (photographs(32, 4) - 0.5) / 0.5
    optimiser = torch.optim.SGD(twin.parameters(), lr=RATE)
    for chosen, labels in batches:
        optimiser.zero_grad()
        functional.cross_entropy(twin(images[chosen]), torch.tensor(labels)).backward()
        optimiser.step()
    returned = dict(twin.named_parameters())
    gradients = {n: ((p - returned[n]) / stated).detach() for n, p in model.named_parameters()}
    return Observation(gradients, model, 1, (3, 32, 32), HALF, HALF, kind="weights", learning_rate=stated)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_term_an_image_at_scale_one(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    for batch in (1, 4):
        step = read_step(changed(honest(make, batch), lambda g: g.to(dtype).float()))
        assert step.terms == batch
        assert step.factor == pytest.approx(1, abs=5e-3) or (batch > 1 and step.factor != step.factor)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 7.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_scale_of_one_image(factor: float, smoothing: float) -> None:
    view = changed(honest(timm_vit, smoothing=smoothing), lambda g: factor * g)
    assert read_step(view).factor == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize(
    ("batches", "make"),
    [
        ([([0], [0]), ([0], [0])], timm_vit),
        ([([0], [0]), ([1], [0])], timm_vit),
        ([([0], [0]), ([1], [1])], narrow_vit),
        ([([0, 1], [0, 1])], narrow_vit),
        ([([0, 1, 2], [0, 1, 0])], timm_vit),
    ],
)
def test_more_steps_or_images_than_stated_are_named_and_hinder(batches: list, make: Callable) -> None:
    found = recognise(after_steps(batches, make=make))
    assert [(finding.name, finding.hinders) for finding in found] == [("several_steps", True)]
    assert "is not one gradient step of 1 image" in found[0].sentence


def test_what_was_stated_raises_no_alarm() -> None:
    view = after_steps([([0], [0]), ([1], [1])])
    assert recognise(dataclasses.replace(view, local_steps=2)) == []
    assert recognise(dataclasses.replace(after_steps([([0, 1], [0, 1])]), num_examples=2)) == []


def test_a_closed_form_alone_answers_with_a_mixture() -> None:
    """Why the classifier is asked: with as many patches as channels, any update has a solution.

    Of weights that were returned, the digits are too few for the mixture, and it is not vouched for.
    """
    view = after_steps([([0], [0]), ([1], [1])], make=narrow_vit)
    found = ATTACKS.get("patch_embedding")()([view])
    assert not found.known.any()
    assert found.details["residual"] < 1e-6
    assert float(psnr(found.images, photographs(32, 1))[0]) < 10


@pytest.mark.parametrize("stated", [0.01, 1.0])
def test_another_learning_rate_is_named_and_put_right(stated: float) -> None:
    clean, found = repair(after_steps([([0], [0])], stated=stated))
    assert [(finding.name, finding.fixed) for finding in found] == [("learning_rate", True)]
    assert f"not one gradient step at the learning rate {stated:g}" in found[0].sentence
    assert "one step at 0.1" in found[0].sentence
    assert clean.learning_rate == pytest.approx(RATE, rel=1e-4)
    right = after_steps([([0], [0])])
    assert all(torch.allclose(g, right.gradients[n], rtol=1e-3, atol=1e-5) for n, g in clean.gradients.items())


class TwoHeads(nn.Module):
    """A classifier on the class token, and a dense head on all tokens whose gradient is a sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.places = timm_vit(), nn.Linear(48, 16)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.vit.forward_features(images)
        return self.vit.forward_head(tokens), self.places(tokens[:, 1:])


def test_a_dense_head_is_not_taken_for_the_classifier() -> None:
    torch.manual_seed(0)
    model, images = TwoHeads(), photographs(32, 1)
    logits, places = model(images)
    loss = functional.cross_entropy(logits, torch.tensor([1])) + functional.cross_entropy(places[0], torch.arange(16))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    view = Observation(gradients, model, 1, (3, 32, 32), HALF, HALF)
    assert find_classifier(view) == "vit.head"
    assert read_step(view).terms == 1


def test_the_search_leaves_running_averages_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 900, 4))
    before = copy.deepcopy(model.state_dict())
    assert model.training
    assert classifier_of(model, (3, 32, 32)) == "3"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_read_is_none() -> None:
    view = honest(timm_vit)
    assert read_step(dataclasses.replace(view, gradients={"pos_embed": view.gradients["pos_embed"]})) is None
    two = narrow_vit(classes=2)
    loss = functional.cross_entropy(logits_of(two(photographs(32, 1))), torch.tensor([1]))
    pairs = zip(two.named_parameters(), torch.autograd.grad(loss, list(two.parameters())), strict=True)
    assert read_step(Observation({n: g for (n, _), g in pairs}, two, 1, (3, 32, 32), HALF, HALF)) is None


@pytest.mark.parametrize("share", [0.0, 1e-40])
def test_a_bias_that_was_not_sent_shows_no_scale(share: float) -> None:
    """Top-k over a tensor may leave little of the classifier's gradient: one term, and nothing says how large."""
    view = honest(timm_vit)
    weight, bias = (torch.zeros_like(view.gradients[f"head.{part}"]) for part in ("weight", "bias"))
    weight[1, 2], bias[1] = 1.0, share
    step = read_step(dataclasses.replace(view, gradients=view.gradients | {"head.weight": weight, "head.bias": bias}))
    assert step.terms == 1
    assert math.isnan(step.factor)
