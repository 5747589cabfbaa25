"""Every closed form recovers a real image where its assumptions hold, and says why where they do not."""

from __future__ import annotations

import dataclasses
from statistics import median

import pytest
import torch
from torch import nn

from attacks import ATTACKS, Capability, Observation, ThreatModel, UsageError, find_tokenizer
from fedmjp.metrics import score
from fedmjp.models import build_model
from tests.conftest import observe, photographs, shared_file

# Attack, first block, precision of the gradient, and the PSNR to reach on a photograph at 64 pixels with random
# weights. On the april block the position gradient's condition number is about 1e7, so float32 round-off decides: what
# float64 recovers to the last digit, float32 leaves below 20 dB (the published leakage of APRIL is about that).
CASES = [
    ("patch_embedding", "standard", torch.float32, 60.0),
    ("patch_embedding", "april", torch.float64, 100.0),
    ("april", "april", torch.float64, 100.0),
    ("batch_rounds", "standard", torch.float32, 60.0),
    ("unmix", "standard", torch.float32, 60.0),
    ("unmix_rounds", "standard", torch.float32, 60.0),
    ("mjp_subspace", "standard", torch.float32, 60.0),
    ("mjp_subspace", "april", torch.float64, 100.0),
    ("mjp_rounds", "standard", torch.float32, 60.0),
]

# Attacks that match the whole update have tests of their own (gradient_matching/).
CLOSED = [name for name in ATTACKS if not ATTACKS.get(name).reads_every_parameter]


def psnr(found, image) -> float:
    return float(score(found.images.to(image), image, patch_size=8)["psnr"][0])


def test_every_attack_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(CLOSED)


@pytest.mark.parametrize(("name", "block", "precision", "threshold"), CASES)
def test_recovers_a_photograph(name: str, block: str, precision: torch.dtype, threshold: float) -> None:
    model = build_model("vit_mini_64", num_classes=8, weights="random", block=block)
    model.module.to(precision)
    image = photographs(64, 1).to(precision)
    found = ATTACKS.get(name)()([observe(model, image)])
    assert found.diagnosis == ""
    assert found.known.all()
    assert psnr(found, image) > threshold


@pytest.mark.parametrize("name", CLOSED)
def test_repeats_itself(name: str, mini) -> None:
    view = observe(mini, photographs(64, 1))
    first, second = (ATTACKS.get(name)()([view]) for _ in range(2))
    assert torch.equal(first.images, second.images)


def no_positions() -> Observation:
    return observe(build_model("vit_mini_64_nope", num_classes=8, weights="random"), photographs(64, 1))


def masked() -> Observation:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", block="april")
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 10:30] = True
    return observe(model, photographs(64, 1), mask=mask)


def changed(**changes) -> Observation:
    model = build_model("vit_mini_64", num_classes=8, weights="random", block="april")
    return observe(model, photographs(64, changes.pop("images", 1)), **changes)


def negligible() -> Observation:
    view = changed()
    return dataclasses.replace(view, gradients={n: g * 1e-20 for n, g in view.gradients.items()})


def convolutional() -> Observation:
    view = changed()
    return dataclasses.replace(view, model=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)))


OBSTACLES = [
    (no_positions, "no learnable position embedding"),
    (masked, "20 of 64 position rows are exactly zero"),
    (lambda: changed(images=2), "the batch holds 2 images"),
    (lambda: changed(local_steps=4, kind="weights"), "4 local steps"),
    (negligible, "gradient norm is"),
    (convolutional, "no patch projection"),
]


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(("make", "words"), OBSTACLES)
def test_says_why_it_cannot_work(name: str, make, words: str) -> None:
    found = ATTACKS.get(name)()([make()])
    assert words in found.diagnosis
    assert found.images is None or not found.known.any()


def test_april_refuses_to_vouch_on_a_pre_norm_block(mini) -> None:
    found = ATTACKS.get("april")()([observe(mini, photographs(64, 1))])
    assert "APRIL's equation does not hold" in found.diagnosis
    assert psnr(found, photographs(64, 1)) < 15


@pytest.mark.parametrize("name", CLOSED)
def test_withheld_position_gradient(name: str, mini) -> None:
    view = observe(mini, photographs(64, 1))
    without = {n: g for n, g in view.gradients.items() if n != "pos_embed"}
    found = ATTACKS.get(name)()([dataclasses.replace(view, gradients=without)])
    assert "frozen or withheld" in found.diagnosis


@pytest.mark.parametrize("name", CLOSED)
def test_nan_gradient_is_an_error(name: str, mini) -> None:
    view = observe(mini, photographs(64, 1))
    view.gradients["pos_embed"][0, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="pos_embed.*not finite"):
        ATTACKS.get(name)()([view])


def test_threat_model_refuses_and_names_the_choices() -> None:
    with pytest.raises(UsageError, match="position_gradient"):
        ATTACKS.get("patch_embedding")().require(ThreatModel(frozenset()), "patch_embedding")
    with pytest.raises(UsageError, match="model_weights"):
        ThreatModel.parse(["everything"])
    assert ThreatModel.parse(["labels"]).grants == {Capability.LABELS}


def test_unknown_attack_names_the_choices() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'april'.*patch_embedding"):
        ATTACKS.get("aprill")


@pytest.mark.slow
def test_deit_s_at_224_above_60_db() -> None:
    model = build_model("deit_s", num_classes=8, weights="random")
    values = [psnr224(model, image) for image in photographs(224, 8)]
    assert min(values) > 60, values


@pytest.mark.slow
def test_trained_vit_ti_above_45_db() -> None:
    weights = shared_file("weights/vit_tiny_patch16_224.tiny_imagenet.safetensors")
    model = build_model("vit_ti", num_classes=200, weights=str(weights))
    values = [psnr224(model, image) for image in photographs(224, 4)]
    assert median(values) > 45, values
    assert min(values) > 40, values


@pytest.mark.slow
def test_april_returns_what_the_patch_projection_keeps_of_the_image() -> None:
    model = build_model("deit_s", num_classes=8, weights="random", block="april")
    model.module.double()
    image = photographs(224, 1).double()
    found = ATTACKS.get("april")()([observe(model, image)])
    tokenizer = find_tokenizer(model.module, (3, 224, 224))
    projection = model.module.patch_embed.proj.weight.detach().flatten(1)  # (384, 768): half of a patch is lost
    kept = tokenizer.patchify(model.normalise(image)) @ torch.linalg.pinv(projection) @ projection
    std, mean = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (model.std, model.mean))
    limit = (tokenizer.unpatchify(kept) * std + mean).clamp(0, 1)
    assert float((found.images - limit).abs().max()) < 1e-3
    assert psnr224_of(found.images.double(), image) < 15


def psnr224(model, image) -> float:
    found = ATTACKS.get("patch_embedding")()([observe(model, image[None])])
    assert found.diagnosis == ""
    return psnr224_of(found.images, image[None])


def psnr224_of(images, originals) -> float:
    return float(score(images, originals, patch_size=16)["psnr"][0])


@pytest.mark.parametrize("name", CLOSED)
def test_many_at_once_is_one_by_one(name: str, mini) -> None:
    other = build_model("vit_mini_64", num_classes=8, weights="random", seed=1, block="april")
    images = photographs(64, 3)
    views = [observe(mini, images[:1]), observe(other, images[1:2]), masked(), no_positions(), negligible()]
    views += [observe(mini, images[2:])]
    together = ATTACKS.get(name)().attack_many([[view] for view in views])
    for view, found in zip(views, together, strict=True):
        alone = ATTACKS.get(name)()([view])
        assert found.diagnosis == alone.diagnosis
        assert (found.images is None) == (alone.images is None)
        if alone.images is not None:
            torch.testing.assert_close(found.images, alone.images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_second_table_is_refused(name: str) -> None:
    """What a table of origins adds to a token is in no message, and nobody here works it out."""
    model = build_model("vit_micro_32_idx", num_classes=8, weights="random")
    found = ATTACKS.get(name)()([observe(model, photographs(32, 1))])
    assert found.images is None
    assert "second table of embeddings to its tokens (idx_embed)" in found.diagnosis
