"""Updates that lack a layer, hide every position or are quantised: every attack answers, and says what is missing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS, Attack, Observation, Reconstruction
from attacks.active.base import ActiveAttack
from attacks.features.feature_decoder import FeatureDecoder
from attacks.gradient_matching.attack import GradientMatching
from attacks.linear.image_prior import VectorialVariation
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from fedmjp.objectives import client_loss
from tests.conftest import observe, photographs

BUILT_IN = [name for name in ATTACKS if ATTACKS.is_built_in(name) and not name.startswith("breaching")]
CLOSED_FORMS = [name for name in BUILT_IN if not ATTACKS.get(name).reads_every_parameter]
# Of batches, of heads that predict places or pixels, of low-rank factors, and of models that the server has prepared.
ACTIVE = tuple(name for name in ATTACKS if issubclass(ATTACKS.get(name), ActiveAttack))
OF_OTHER_UPDATES = ("batch_tokens", "position_head", "pixel_head", "lora_span", *ACTIVE)
# Those that solve with the patch projection's gradient.
NO_PROJECTION = ("april", "token_span", "token_inverse", "later_block", "patch_set", *OF_OTHER_UPDATES)
OF_PROJECTION = [name for name in CLOSED_FORMS if name not in NO_PROJECTION]
FIRST_LAYERS = (
    "cls_token",
    "pos_embed",
    "unk_embed",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "blocks.0.norm1.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.0.mlp.fc1.weight",
    "blocks.0.mlp.fc1.bias",
    "blocks.0.mlp.fc2.weight",
    "head.bias",
)


def attack_of(name: str) -> Attack:
    """The attack, with a single step where it searches, few where it weighs, and few images where it learns."""
    kind = ATTACKS.get(name)
    if name == "noisy_rounds":
        return kind(prior=VectorialVariation(smoothing=(None, 0.01), iterations=10))
    if issubclass(kind, FeatureDecoder):
        return kind(images=160)
    return kind(steps=1) if issubclass(kind, GradientMatching) else kind()


def small(**options) -> BuiltModel:
    return build_model("vit_micro_32_mjp", num_classes=5, weights="random", **options)


def masked(share: float) -> Observation:
    """The update of a client that hides a share of its 64 positions."""
    return observe(small(), photographs(32, 1), mask=torch.arange(64)[None] < share * 64)


def quantised(gradient: Tensor) -> Tensor:
    """Rounded to 255 levels, as float32."""
    step = gradient.abs().max() / 127
    return (gradient / step).round() * step if step > 0 else gradient


def answers(name: str, view: Observation) -> Reconstruction:
    """The attack's answer, which is images or a reason, and no crash."""
    found = attack_of(name)([view])
    assert not found.diagnosis.startswith("the attack failed"), found.diagnosis
    assert found.images is not None or found.diagnosis
    assert found.images is None or found.images.isfinite().all()
    return found


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_first_layer_may_be_missing(name: str) -> None:
    whole = masked(0.1)
    for layer in FIRST_LAYERS:
        view = dataclasses.replace(whole, gradients={n: g for n, g in whole.gradients.items() if n != layer})
        answers(name, view)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *[(name, "patch_embed.proj.weight") for name in OF_PROJECTION],
        ("token_span", "blocks.0.attn.qkv.weight"),
        ("april", "blocks.0.attn.qkv.weight"),
        ("unmix", "blocks.0.mlp.fc1.weight"),
        ("unmix_rounds", "blocks.0.mlp.fc2.bias"),
    ],
)
def test_the_missing_layer_is_named(name: str, layer: str) -> None:
    model = build_model("vit_mini_32_mjp", num_classes=5, weights="random")
    view = observe(model, photographs(32, 1), mask=torch.arange(64)[None] < 6)
    del view.gradients[layer]
    assert f"no gradient of {layer}" in answers(name, view).diagnosis


@pytest.mark.parametrize("name", OF_PROJECTION)
def test_a_projection_gradient_of_zeros_is_named(name: str) -> None:
    view = masked(0.1)
    view.gradients["patch_embed.proj.weight"].zero_()
    assert "no gradient of patch_embed.proj.weight (frozen or withheld, or zero" in answers(name, view).diagnosis


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_position_hidden(name: str) -> None:
    found = answers(name, masked(1.0))
    assert found.known is None or not found.known.any()
    if name == "token_span":
        assert "65 tokens in 64 channels" in found.diagnosis
    elif name in ("token_inverse", "later_block"):
        assert "may be masked" in found.diagnosis
    elif name == "patch_set":
        assert "has a position embedding" in found.diagnosis
    elif name in CLOSED_FORMS and name not in OF_OTHER_UPDATES:
        assert "64 of 64 position rows are exactly zero" in found.diagnosis


@pytest.mark.parametrize("name", BUILT_IN)
def test_quantised_to_eight_bits(name: str) -> None:
    view = masked(0.1)
    found = answers(name, dataclasses.replace(view, gradients={n: quantised(g) for n, g in view.gradients.items()}))
    assert found.known is None or not found.known.any()
    if name in CLOSED_FORMS:
        assert found.diagnosis


@pytest.mark.parametrize("name", BUILT_IN)
def test_integers_are_refused(name: str) -> None:
    view = masked(0.1)
    view = dataclasses.replace(view, gradients={n: (g * 1e4).to(torch.int8) for n, g in view.gradients.items()})
    assert "int8: multiply quantised values by their scale" in answers(name, view).diagnosis


def test_a_bias_gradient_of_zeros_counts_as_missing() -> None:
    view = masked(0.1)
    view.gradients["patch_embed.proj.bias"].zero_()
    for name in CLOSED_FORMS:
        answers(name, view)


@pytest.mark.parametrize(("name", "block"), [("patch_embedding", "standard"), ("april", "april")])
def test_the_localisation_term_is_removed_where_nothing_is_masked(name: str, block: str) -> None:
    model = build_model("vit_mini_32_mjp", num_classes=5, weights="random", dal="nonlinear", block=block)
    model.module.double()
    image = photographs(32, 1).double()
    names, weights = zip(*model.module.named_parameters(), strict=True)
    found = []
    for dal in (0.0, 0.1):
        loss = client_loss(model, image, torch.tensor([0]), None, {"dal": dal})
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        sent = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
        found.append(answers(name, dataclasses.replace(observe(model, image), gradients=sent)))
    assert found[1].diagnosis == ""
    assert psnr(found[0].images.double(), image)[0] > 60
    assert psnr(found[1].images.double(), image)[0] > 60
