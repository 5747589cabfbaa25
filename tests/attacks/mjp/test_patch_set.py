"""All patches of a photograph from a model without position embedding, in no order."""

from __future__ import annotations

import dataclasses

import pytest
import scipy.optimize
import torch

from attacks import ATTACKS, ThreatModel, find_tokenizer
from attacks.certificate import TOLERANCE, certify
from attacks.mjp.placement import Placement
from attacks.mjp.token_patches import known_span
from attacks.observation import ORDER_GUESSED
from fedmjp.audit import audit_gradient
from fedmjp.audit.suite import select_attacks
from fedmjp.audit.verdict import Answer
from fedmjp.models import build_model
from tests.conftest import observe, photographs

HALF_CELL = 10 ** (-25 / 10)  # mean squared error of a patch at 25 dB


@pytest.fixture(scope="module")
def trained():
    return build_model("vit_mini_64_nope", num_classes=200, weights="auto")


@pytest.fixture(scope="module")
def view(trained):
    return observe(trained, photographs(64, 1))


def test_trained_weights_hide_the_order_only(trained, view) -> None:
    image = photographs(64, 1).double()
    found = ATTACKS.get("patch_set")(placement=Placement(restarts=1))([view])
    tokenizer = find_tokenizer(trained.module, view.image_shape)
    ours, true = (tokenizer.patchify(images.double())[0] for images in (found.images, image))
    error = torch.cdist(ours, true).square() / true.shape[1]
    right = scipy.optimize.linear_sum_assignment(error.clamp(max=1.0).numpy())
    assert float((error[right] < HALF_CELL).double().mean()) > 0.9
    assert not found.diagnosis
    assert not found.known.any()
    # The patches reproduce the update, as they do in every order, so that no order is certified.
    assert ORDER_GUESSED in found.flags
    other = tokenizer.unpatchify(tokenizer.patchify(found.images).flip(1))
    for images in (found.images, other):
        answer = dataclasses.replace(found, images=images)
        agrees, residual = certify(view, answer)
        assert not agrees
        assert residual < TOLERANCE
        assert certify(view, dataclasses.replace(answer, flags=()))[0]


def test_span_holds_the_patches(trained, view) -> None:
    tokenizer = find_tokenizer(trained.module, view.image_shape)
    known = known_span(view, tokenizer)
    true = tokenizer.patchify(trained.normalise(photographs(64, 1)).double())[0]
    apart = true - known.rows
    assert float((apart - (apart @ known.basis.T) @ known.basis).norm()) < 1e-3 * float(apart.norm())


def test_suite_chooses_it_without_positions(view) -> None:
    suite = select_attacks(["auto"], [view], ThreatModel())
    assert "patch_set" in suite.chosen
    assert (
        "has a position embedding"
        in select_attacks(
            ["auto"],
            [observe(build_model("vit_mini_64", num_classes=8, weights="random"), photographs(64, 1))],
            ThreatModel(),
        ).left_out["patch_set"]
    )


def test_the_audit_counts_the_patches_wherever_they_lie(monkeypatch) -> None:
    small = build_model("vit_mini_32_nope", num_classes=10, weights="auto")
    image = photographs(32, 1)
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(Placement, "place", lambda self, grid, pieces, masked: torch.randperm(64, generator=generator))
    normalisation = {"mean": list(small.mean), "std": list(small.std)}
    gradients = observe(small, image).gradients
    found = audit_gradient(small.module, image, gradients, **normalisation, attacks=["patch_set"])
    assert found.verdict.answer is Answer.PARTLY
    assert "but 100 % of patches, in an order that the update does not hold (patch_set," in found.verdict.headline()
    row = found.rows[found.rows["attack"] == "patch_set"].iloc[0]
    assert row["patch_recovery"] < 0.5 < row["any_place"] == 1.0
