"""Gradients from one batched pass equal those computed one image at a time by autograd."""

from __future__ import annotations

import pytest
import torch

from fedmjp.audit.per_image import attacked_gradients, observe_each
from fedmjp.audit.victims import grant_token_gradient
from fedmjp.models import build_model
from fedmjp.objectives import client_loss
from tests.conftest import observe, photographs

LABELS = torch.tensor([1, 6, 3])
LAYERS = ("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
CASES = [
    (name, block, precision, tolerance)
    for name in ("vit_mini_64", "vit_mini_64_nope", "vit_mini_64_mjp")
    for block in ("standard", "april")
    for precision, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10))
]


def check(model, precision: torch.dtype, tolerance: float, size: int) -> None:
    model.module.to(precision)
    images = photographs(size, 3).to(precision)
    mask = None
    if model.hides_positions:
        mask = torch.rand(3, model.grid[0] * model.grid[1], generator=torch.Generator().manual_seed(0)) < 0.3
    together = observe_each(model, attacked_gradients(model, images, LABELS, mask, layers=LAYERS))
    for b, view in enumerate(together):
        alone = observe(model, images[b : b + 1], LABELS[b : b + 1], None if mask is None else mask[b : b + 1])
        for name, gradient in view.gradients.items():
            expected = alone.gradients[name]
            assert gradient.shape == expected.shape
            assert gradient.dtype == precision
            error = (gradient - expected).norm() / expected.norm()
            assert float(error) < tolerance, (name, float(error))


@pytest.mark.parametrize(("name", "block", "precision", "tolerance"), CASES)
def test_equals_one_by_one(name: str, block: str, precision: torch.dtype, tolerance: float) -> None:
    model = build_model(name, num_classes=8, weights="random", block=block)
    check(model, precision, tolerance, 64)


@pytest.mark.long
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_equals_one_by_one_at_224(precision: torch.dtype, tolerance: float) -> None:
    check(build_model("deit_s_mjp", num_classes=8, weights="random"), precision, tolerance, 224)


def test_an_unused_unknown_embedding_sends_zeros() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    assert not attacked_gradients(model, photographs(64, 3), LABELS)["unk_embed"].any()


def test_masked_rows_are_zero_and_their_sum_is_the_unknown_embeddings_gradient() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 5:20] = True
    images = photographs(64, 1)
    hidden = attacked_gradients(model, images, LABELS[:1], mask)
    rows = hidden["pos_embed"][0, 0, 1:]
    assert (rows.abs().sum(dim=1) == 0).equal(mask[0])
    # A token's gradient does not depend on which embedding is added to it; the projection's bias gets their sum.
    total = rows.sum(dim=0) + hidden["unk_embed"][0, 0, 0]
    torch.testing.assert_close(total, hidden["patch_embed.proj.bias"][0], atol=1e-7, rtol=1e-4)


def test_token_gradient_of_a_model_without_positions() -> None:
    model = build_model("vit_mini_64_nope", num_classes=8, weights="random")
    granted = grant_token_gradient(model)
    images = photographs(64, 2)
    torch.testing.assert_close(
        granted.module(granted.normalise(images)), model.module(model.normalise(images)), atol=1e-6, rtol=0
    )
    assert model.module.pos_embed is None
    rows = attacked_gradients(granted, images, LABELS[:2])["pos_embed"][:, 0, 1:]  # (B, N, D)
    weight = attacked_gradients(model, images, LABELS[:2])["patch_embed.proj.weight"].flatten(2)
    patches = torch.nn.functional.unfold(model.normalise(images), 8, stride=8).mT
    torch.testing.assert_close(rows.mT @ patches, weight, atol=1e-7, rtol=1e-3)


def test_the_localisation_loss_is_added_per_image() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="nonlinear")
    images, mask = photographs(64, 3), torch.rand(3, 64, generator=torch.Generator().manual_seed(1)) < 0.4
    together = attacked_gradients(model, images, LABELS, mask, loss_weights={"dal": 1.0})
    without = attacked_gradients(model, images, LABELS, mask)
    for b in range(3):
        loss = client_loss(model, images[b : b + 1], LABELS[b : b + 1], mask[b : b + 1], {"dal": 1.0})
        expected = torch.autograd.grad(loss, model.module.pos_embed)[0]
        torch.testing.assert_close(together["pos_embed"][b], expected, atol=1e-6, rtol=1e-3)
        assert float((expected - without["pos_embed"][b]).abs().max()) > 1e-4
        assert (
            float((together["pos_embed"][b] - attacked_gradients(model, images, LABELS, mask)["pos_embed"][b]).norm())
            > 0
        )
