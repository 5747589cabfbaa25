"""Sums of several local steps: closed forms read them as one step on one image, or as a batch of all their images."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from attacks import ATTACKS, Observation
from attacks.certificate import certify
from attacks.fingerprints import recognise
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from tests.conftest import photographs

RATE = 0.1


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=8, weights="auto")


def sent(
    model: BuiltModel, batches: list[torch.Tensor], rate: float = RATE, labels: tuple[int, ...] = (), **changes
) -> Observation:
    """What the server makes of the weights after a step of PyTorch's SGD on each batch, of class 0 or of `labels`."""
    after = copy.deepcopy(model.module)
    optimiser = torch.optim.SGD(after.parameters(), lr=rate)
    for images, label in zip(batches, labels or [0] * len(batches), strict=True):
        optimiser.zero_grad()
        cross_entropy(after(model.normalise(images)), torch.tensor([label])).backward()
        optimiser.step()
    returned = dict(after.named_parameters())
    gradients = {n: ((p - returned[n]) / rate).detach() for n, p in model.module.named_parameters()}
    view = Observation(
        gradients,
        model.module,
        num_examples=len(batches[0]),
        image_shape=tuple(batches[0].shape[1:]),
        mean=model.mean,
        std=model.std,
        kind="weights",
        local_steps=len(batches),
        learning_rate=rate,
    )
    return dataclasses.replace(view, **changes)


@pytest.mark.parametrize(("steps", "rate"), [(2, 0.1), (8, 0.1), (8, 1e-3)])
def test_steps_on_one_image_are_exact_at_any_rate(trained, steps: int, rate: float) -> None:
    image = photographs(32, 1)
    view = sent(trained, [image] * steps, rate)
    found = ATTACKS.get("patch_embedding")()([view])
    assert found.diagnosis == ""
    assert found.known.all()
    assert float(psnr(found.images, image)) > 35
    certified, residual = certify(view, found)
    assert certified or rate < RATE, residual  # the rounding of the weights is divided by the rate
    wrong = dataclasses.replace(found, images=found.images.flip(-1))
    assert not certify(view, wrong)[0]


@pytest.mark.parametrize("said", [3, 1])
def test_steps_on_different_images_are_neither_vouched_for_nor_certified(trained, said: int) -> None:
    """Whether the number of steps is stated or not; not stated, the classifier's gradient shows that there are more."""
    images = photographs(32, 3)
    view = sent(trained, [images[i : i + 1] for i in range(3)], labels=(0, 3, 5), local_steps=said)
    found = ATTACKS.get("patch_embedding")()([view])
    assert not certify(view, found)[0]
    if said > 1:
        assert not found.known.any()
        assert "3 local steps: several batches" in found.diagnosis
    else:
        assert [(f.name, f.hinders) for f in recognise(view)] == [("several_steps", True)]


def test_where_nothing_is_spare_steps_are_not_taken_for_one_image() -> None:
    """With as many patches as channels any sum has a solution."""
    model = build_model("vit_micro_32", num_classes=8, weights="random")
    assert model.module.embed_dim <= model.module.patch_embed.num_patches
    found = ATTACKS.get("patch_embedding")()([sent(model, [photographs(32, 1)] * 2)])
    assert "does not show whether all are of one image" in found.diagnosis
    assert not found.known.any()


def test_steps_on_different_images_are_a_batch_of_all_of_them() -> None:
    """Each of four images in three of six updates of two steps, each time with another one.

    In float64: of float32 weights the round-off, divided by the rate, hides too many directions of these photographs.
    """
    model, images = build_model("vit_mini_64", num_classes=8, weights="auto"), photographs(64, 4).double()
    model.module.double()
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
    views = [sent(model, [images[i : i + 1] for i in pair], labels=pair) for pair in pairs]
    found = ATTACKS.get("batch_rounds")()(views)
    assert found.diagnosis == ""
    assert found.known.all()
    values = [max(float(psnr(one[None], images[i : i + 1])) for one in found.images) for i in pairs[-1]]
    assert min(values) > 45, values
    alone = ATTACKS.get("batch_rounds")()(views[-1:])
    assert "the batch holds 1 image and the update sums 2 local steps; 0 could be identified" in alone.diagnosis
