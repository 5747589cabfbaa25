"""`token_span` against a solution place by place, on photographs, on three libraries' models, and where it fails."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from torch import Tensor, nn

from attacks import ATTACKS, Observation, UsageError, find_tokenizer
from attacks.linear.input_spans import layer_gradient, span_of_inputs
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import score
from fedmjp.models import BuiltModel, build_model
from tests.attacks.models import hugging_face_vit, timm_vit, torchvision_vit
from tests.conftest import observe, photographs

attack = ATTACKS.get("token_span")
WITHHELD = {"positions": ("pos_embed",), "patches": ("patch_embed",), "both": ("pos_embed", "patch_embed")}


def without(view: Observation, *beginnings: str) -> Observation:
    """The update without the parameters whose names begin so."""
    left = {n: g for n, g in view.gradients.items() if not n.startswith(beginnings)}
    return dataclasses.replace(view, gradients=left)


def psnr(found: Tensor, image: Tensor, patch: int = 4) -> float:
    return float(score(found.float(), image.float(), patch_size=patch)["psnr"][0])


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=10, weights="auto")


@pytest.mark.parametrize("what", WITHHELD)
def test_recovers_photographs_whatever_is_withheld(trained, what: str) -> None:
    for image in photographs(32, 4).split(1):
        found = attack()([without(observe(trained, image), *WITHHELD[what])])
        assert found.diagnosis == ""
        assert found.known.all()
        assert psnr(found.images, image) > 60


def test_frozen_positions_are_no_secret(trained) -> None:
    image = photographs(32, 1)
    view = observe(trained, image)
    zeros = view.gradients | {"pos_embed": torch.zeros_like(view.gradients["pos_embed"])}
    assert psnr(attack()([dataclasses.replace(view, gradients=zeros)]).images, image) > 60


@pytest.mark.parametrize("size", ["32", "64"])
def test_expected_error_is_the_true_one_within_a_factor_of_four(size: str) -> None:
    model = build_model(f"vit_mini_{size}", num_classes=8, weights="random")
    for image in photographs(int(size), 4).split(1):
        found = attack(steps=0)([without(observe(model, image), "pos_embed")])
        error = float((found.images - image).square().mean().sqrt())
        assert error / 4 < found.details["deviation"] < error * 4


def test_the_mlps_spans_settle_what_the_attentions_leaves_open() -> None:
    model = build_model("vit_mini_64", num_classes=8, weights="random")
    images = photographs(64, 3).split(1)
    views = [without(observe(model, image), "pos_embed") for image in images]
    gains = []
    for image, view in zip(images, views, strict=True):
        before, after = (attack(steps=steps)([view]) for steps in (0, 3))
        gains.append(psnr(after.images, image) - psnr(before.images, image))
        assert after.details["residual"] < 2 * before.details["residual"]
    assert sorted(gains)[1] > 5, gains


@pytest.mark.long
def test_fewer_equations_than_unknowns_are_solved_all_the_same() -> None:
    """As on DeiT-S at 224 pixels, in a quarter of the time: 91 equations a patch for 100 unknowns."""
    model = build_model("vit_ti", num_classes=8, weights="random", image_size=160)
    image = photographs(160, 1)
    found = attack()([without(observe(model, image), "pos_embed")])
    assert found.details["equations"] < found.details["unknowns"]
    assert found.details["steps"] == 3
    assert psnr(found.images, image, patch=16) > 30  # 41.1 when this was written
    error = (found.images - image).square().mean(dim=1, keepdim=True)
    right = torch.nn.functional.avg_pool2d(error, 16).sqrt() < 10 ** (-25 / 20)
    vouched = torch.nn.functional.avg_pool2d(found.known.float(), 16) == 1
    assert int((vouched & ~right).sum()) < 0.05 * max(int(vouched.sum()), 20)


def test_agrees_with_least_squares_place_by_place_in_float64() -> None:
    """Each place solved alone, from the definition: the scale of its norm is one more unknown, nothing is weighed."""
    model = build_model("vit_mini_32", num_classes=8, weights="random")
    model.module.double()
    image = photographs(32, 1).double()
    view = without(observe(model, image), "pos_embed", "patch_embed")
    found = attack()([view])
    expected = place_by_place(model, view)
    tokenizer = find_tokenizer(model.module, (3, 32, 32))
    pixels = view.to_pixels(tokenizer.unpatchify(expected[None]))
    assert psnr(pixels, image) > 90
    assert float((found.images.double() - pixels).abs().max()) < 1e-4
    assert found.details["residual"] < 1e-6


def place_by_place(model: BuiltModel, view: Observation) -> Tensor:
    """(N, P) patches by `torch.linalg.lstsq` for every place."""
    module = model.module
    block, conv = module.blocks[0], module.patch_embed.proj
    layer = block.attn.qkv
    s = torch.cat(
        [view.gradients[f"blocks.0.attn.qkv.{k}"].reshape(len(layer.weight), -1) for k in ("weight", "bias")], 1
    )
    outside = torch.linalg.svd(s)[2][module.patch_embed.num_patches + 1 :]  # no row of S has these directions
    gamma, beta = block.norm1.weight.detach(), block.norm1.bias.detach()
    centre = torch.eye(len(gamma)).double() - 1 / len(gamma)
    token_to_input = torch.cat([gamma[:, None] * centre, torch.zeros(1, len(gamma)).double()])  # (D + 1, D)
    scale = torch.cat([beta, torch.ones(1).double()])
    e = conv.weight.detach().flatten(1)
    rows = []
    for position in module.pos_embed[0, 1:].detach():
        matrix = outside @ torch.cat([token_to_input @ e, scale[:, None]], dim=1)  # of patch and scale
        constant = outside @ token_to_input @ (conv.bias.detach() + position)
        rows.append(torch.linalg.lstsq(matrix, -constant[:, None], driver="gelsd").solution[:-1, 0])
    return torch.stack(rows)


def test_conditions_err_by_what_the_span_says() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 60, generator=generator, dtype=torch.float64)
    inputs *= torch.logspace(0, -3, 60, dtype=torch.float64)
    outer = torch.randn(90, 20, generator=generator, dtype=torch.float64)
    clean = outer @ inputs
    for noise in (1e-9, 1e-7):
        s = clean + noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
        span = span_of_inputs(s, 20, torch.float64)
        true = (inputs @ span.conditions.T).square().mean(dim=1)
        said = span.error((inputs @ span.directions.T).square())
        assert float((said / true).log().abs().median().exp()) < 1.3


def test_outside_is_what_the_conditions_see() -> None:
    generator = torch.Generator().manual_seed(0)
    s, inputs = (torch.randn(n, 12, generator=generator, dtype=torch.float64) for n in (30, 5))
    span = span_of_inputs(s, 4, torch.float64)
    outside = span.outside(inputs)
    torch.testing.assert_close(outside, inputs @ span.conditions.T @ span.conditions)
    torch.testing.assert_close(outside @ span.directions[:4].T, torch.zeros(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("make", [timm_vit, torchvision_vit, hugging_face_vit])
def test_other_libraries_models(make) -> None:
    torch.manual_seed(0)
    module = make().eval().double()
    for name, parameter in module.named_parameters():
        if name.endswith(("head.weight", "heads.head.weight", "classifier.weight")):
            nn.init.normal_(parameter, std=0.5)  # torchvision's head starts at zero
    image = photographs(32, 1).double()
    model = BuiltModel(module, "other", "standard", 32, 8, (0.5,) * 3, (0.5,) * 3, "random")
    view = observe_any(model, image)
    found = attack(iterations=10)([without(view, find_tokenizer(module, (3, 32, 32)).positions)])
    assert found.images is not None, found.diagnosis
    assert found.details["residual"] < 0.02
    assert found.details["steps"] >= 0


def observe_any(model: BuiltModel, image: Tensor) -> Observation:
    """The update of any library's model on one image of class 0."""
    output = model.module(model.normalise(image))
    logits = getattr(output, "logits", output)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0]))
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
    return Observation(gradients, model.module, 1, tuple(image.shape[1:]), model.mean, model.std)


def test_positions_that_are_never_trained(trained) -> None:
    image = photographs(32, 1)
    view = observe(trained, image)
    model = build_model("vit_mini_32", num_classes=10, weights="auto").module
    table = model.pos_embed.detach()
    del model.pos_embed
    model.register_buffer("pos_embed", table)
    found = attack()([dataclasses.replace(without(view, "pos_embed"), model=model)])
    assert psnr(found.images, image) > 60


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("blocks.0.attn.qkv", "the update holds no gradient of blocks.0.attn.qkv.weight (frozen or withheld"),
    ],
)
def test_says_which_gradient_is_lacking(mini, lacking: str, words: str) -> None:
    found = attack()([without(observe(mini, photographs(64, 1)), lacking)])
    assert found.images is None
    assert words in found.diagnosis


def test_names_the_numbers_where_tokens_outnumber_channels() -> None:
    torch.manual_seed(0)
    module = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    ).eval()
    model = BuiltModel(module, "narrow", "standard", 32, 8, (0.5,) * 3, (0.5,) * 3, "random")
    found = attack()([without(observe_any(model, photographs(32, 1)), "pos_embed")])
    assert "17 tokens in 16 channels" in found.diagnosis
    assert "0 equations a patch for 16 unknowns" in found.diagnosis


def test_too_few_equations_are_named_and_nothing_is_vouched_for(mini) -> None:
    found = attack()([without(observe(mini, photographs(64, 1)), "pos_embed", "patch_embed")])
    assert "127 equations a patch for 192 unknowns" in found.diagnosis
    assert not found.known.any()


def test_hidden_positions_are_not_vouched_for(trained) -> None:
    model = build_model("vit_mini_32_mjp", num_classes=10, weights="auto")
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 20:30] = True
    view = without(observe(model, photographs(32, 1), mask=mask), "pos_embed", "unk_embed")
    found = attack(steps=0)([view])
    assert "hidden positions" in found.diagnosis
    assert not found.known.any()


def test_left_out_where_the_position_gradient_is_at_hand(trained) -> None:
    view = observe(trained, photographs(32, 1))
    assert "patch_embedding" in attack().obstacle([view])
    assert attack().obstacle([without(view, "pos_embed")]) == ""
    rows = view.gradients["pos_embed"]
    noisy = rows + rows.std() * torch.randn(rows.shape, generator=torch.manual_seed(0))
    for spoilt in (noisy, rows.mean(dim=1, keepdim=True).expand_as(rows), rows.sign()):
        assert attack().obstacle([dataclasses.replace(view, gradients=view.gradients | {"pos_embed": spoilt})]) == ""
    assert "no gradient of blocks.0.attn.qkv" in attack().obstacle([without(view, "pos_embed", "blocks.0.attn")])


def test_gradient_without_bias_has_a_column_less(mini) -> None:
    gradients = {"a.weight": torch.ones(4, 3), "a.bias": torch.ones(4)}
    assert layer_gradient(gradients, "a.weight").shape == (4, 4)
    assert layer_gradient({"a.weight": torch.ones(4, 3)}, "a.weight").shape == (4, 3)
    with pytest.raises(UsageError, match="no patch projection"):
        attack().estimated_seconds([dataclasses.replace(observe(mini, photographs(64, 1)), model=nn.Linear(2, 2))])


def test_nothing_is_vouched_for_under_noise_that_the_client_adds() -> None:
    """Of the 64 patches that it would give here, 52 are wrong."""
    model, image = build_model("vit_mini_64", num_classes=8, weights="auto"), photographs(64, 2)[1:]
    view = without(observe(model, image), "pos_embed")
    noise = DEFENSES.get("noise")(noise_unit="entry", noise_multiplier=1e-3)
    plain = attack(steps=0)
    assert plain([view]).known.all()
    sent = noise.on_update(dict(view.gradients), torch.Generator().manual_seed(9))
    found = plain([dataclasses.replace(view, gradients=sent)])
    assert "noise that the client added" in found.diagnosis
    assert not found.known.any()
