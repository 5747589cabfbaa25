"""Tokens with codes of their places: who sends a gradient through units set for places, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacks import ATTACKS, Observation, Reconstruction, UsageError
from attacks.active.base import ActiveAttack
from attacks.active.token_bins import TokenBins
from attacks.active.token_codes import codes_for
from attacks.certificate import certify
from attacks.memory import remember
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.metrics.pixel import psnr
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.conftest import observe, photographs

SHAPE = (3, 32, 32)


def micro(defense: Defense | None = None, name: str = "vit_micro_32") -> BuiltModel:
    return build_model(name, num_classes=10, weights="random", adapt=defense.adapt if defense else None)


def rounds(
    attack: ActiveAttack, built: BuiltModel, images: Tensor, count: int, defense: Defense | None = None
) -> list[Reconstruction]:
    """What the attack answers in each round to a client that trains on the same images."""
    history: list[Observation] = []
    answers, shape = [], tuple(images.shape[1:])
    for _ in range(count):
        sent = attack.send(before(built, shape, history)).model(built.module, shape)
        view = observe(replace(built, module=sent), images)
        if defense is not None:
            view = replace(view, gradients={n: g for n, g in view.gradients.items() if not defense.freezes(n)})
        answers.append(attack([*history, view]))
        history.append(remember(view, attack.remembered_layers(sent, shape)))
    return answers


def test_a_unit_is_switched_on_by_one_place_of_the_brighter_images() -> None:
    """The gradient at every unit's input, by autograd in float64, against the brightness of the images."""
    built, images = micro(), photographs(32, 3).double() * torch.tensor([1.5, 1.0, 0.3]).view(3, 1, 1, 1)
    built.module.double()
    images = images.clamp(0, 1)
    sent = TokenBins().send(before(built, SHAPE)).model(built.module, SHAPE)
    seen: list[Tensor] = []
    sent.blocks[0].mlp.fc1.register_forward_hook(lambda _, __, output: seen.append(output))
    loss = functional.cross_entropy(sent(built.normalise(images)), torch.arange(3))
    sent_back = torch.autograd.grad(loss, seen[0])[0]  # (3, 65, units)
    per_place = sent_back.shape[2] // 64
    units = sent_back[..., : 64 * per_place].unflatten(2, (64, per_place)).abs()  # (3, 65, 64, thresholds)
    at_place = units[:, 1:].diagonal(dim1=1, dim2=2).permute(0, 2, 1)  # (3, 64, thresholds)
    elsewhere = units.clone()
    elsewhere[:, 1:].diagonal(dim1=1, dim2=2).zero_()
    assert elsewhere.max() <= 1e-12 * units.max()
    on = at_place > 1e-12 * units.max()
    assert (on == on[:, :1]).all()  # every place of an image passes the same thresholds
    passed = on[:, 0].sum(dim=1)
    assert passed.tolist() == [3, 2, 1]  # of the thresholds below all images, at 1/3, at 2/3 and above all
    assert (on[:, 0] == (torch.arange(per_place) < passed[:, None])).all()


def test_patches_are_read_back_from_normed_tokens() -> None:
    codes = codes_for(micro().module, SHAPE)
    patches = torch.randn(64, codes.tokenizer.patch_dim, generator=torch.Generator().manual_seed(0)).double()
    parameters = codes.parameters(micro().module)
    tokens = patches @ parameters["patch_embed.proj.weight"].flatten(1).T.double() + parameters["pos_embed"][0, 1:]
    normed = functional.layer_norm(tokens, tokens.shape[1:], eps=0.0)
    torch.testing.assert_close(codes.patches(normed), patches, atol=1e-9, rtol=0)
    assert codes.spread(normed).abs().max() < 1e-9
    mixed = (normed[:1] + functional.layer_norm(tokens[:1] + tokens[1:2] * 0.01, tokens.shape[1:], eps=0.0)) / 2
    assert codes.spread(mixed).abs().max() > 0


def test_images_alone_in_their_bin_come_back_whole() -> None:
    built, images = micro(name="vit_mini_32"), photographs(32, 4)
    (found,) = rounds(TokenBins(), built, images, 1)
    whole = found.known.flatten(1).all(dim=1)
    assert whole.sum() >= 2
    assert found.details["single"] == int(whole.sum())
    nearest = [max(float(psnr(one[None], image[None])[0]) for image in images) for one in found.images[whole]]
    assert min(nearest) > 60


def test_images_of_one_bin_are_said_to_be_mixed_and_another_slice_parts_them() -> None:
    built, image = micro(name="vit_mini_32"), photographs(32, 1)
    images = torch.cat([image, image.flip(3) * 0.98])  # of nearly the same brightness
    (found,) = rounds(TokenBins(), built, images, 1)
    assert found.details["single"] == 0
    assert "several images" in found.diagnosis
    parted = [answer for answer in rounds(TokenBins(slices=8), built, images, 8) if answer.details["single"]]
    assert sum(answer.details["single"] for answer in parted) == 2


@pytest.mark.parametrize(
    ("name", "defense", "count", "share"),
    [("adapter_trap", "adapters", 2, 1.0), ("lora_trap", "lora", 2, 0.25)],  # 32 and 8 of 64 patches a round
)
def test_trained_layers_alone_give_the_image_away(name: str, defense: str, count: int, share: float) -> None:
    chosen, image = DEFENSES.get(defense)(), photographs(32, 1)
    found = rounds(ATTACKS.get(name)(), micro(chosen), image, count, chosen)[-1]
    assert found.details["patches"] == 64 * share
    assert 0.75 * share <= float(found.known.float().mean()) <= share
    known = found.known.expand_as(image)
    error = (found.images - image)[known].square().mean()
    assert -10 * float(error.log10()) > 40
    assert (found.diagnosis == "") == (share == 1)


@pytest.mark.parametrize("level", [0.0, 1e-6, 1e-5, 1e-4, 1e-3, "float16", "bfloat16"])
def test_what_a_trap_in_low_rank_terms_vouches_for_is_right(level: float | str) -> None:
    """Under noise of `level` rms, and of messages of half precision."""
    chosen, image, attack = DEFENSES.get("lora")(), photographs(32, 1), ATTACKS.get("lora_trap")()
    built = micro(chosen)
    view = observe(replace(built, module=attack.send(before(built, SHAPE)).model(built.module, SHAPE)), image)
    generator = torch.Generator().manual_seed(0)
    sent = {}
    for name, gradient in view.gradients.items():
        rms = float(gradient.square().mean().sqrt())
        if isinstance(level, str):
            sent[name] = gradient.to(getattr(torch, level)).float()
        else:
            sent[name] = gradient + level * rms * torch.randn(gradient.shape, generator=generator)
    found = attack([replace(view, gradients={n: g for n, g in sent.items() if not chosen.freezes(n)})])
    squares = torch.nn.functional.avg_pool2d((found.images - image).square().mean(dim=1, keepdim=True), 4)
    known = found.known[:, :, ::4, ::4]
    assert bool((squares[known] < 10**-2.5).all())
    assert known.any() or level != 0.0


@pytest.mark.parametrize(("name", "defense"), [("adapter_trap", "adapters"), ("lora_trap", "lora")])
def test_half_an_image_is_not_certified_where_the_gradient_hardly_depends_on_it(name: str, defense: str) -> None:
    """On a model whose tokens hold little but codes the wrong half changes the gradient by 4e-4 to 3e-3."""
    chosen, image, attack = DEFENSES.get(defense)(), photographs(32, 1), ATTACKS.get(name)()
    built = micro(chosen)
    view = observe(replace(built, module=attack.send(before(built, SHAPE)).model(built.module, SHAPE)), image)
    found = attack([view])
    assert not found.known.all()
    certified, residual = certify(view, found)
    assert residual < 5e-3
    assert not certified
    assert certify(view, replace(found, images=image))[0]


def test_rounds_on_another_image_are_left_out() -> None:
    chosen, images, attack = DEFENSES.get("adapters")(), photographs(32, 2), ATTACKS.get("adapter_trap")()
    built, history = micro(chosen), list[Observation]()
    for image in images.split(1):
        sent = attack.send(before(built, SHAPE, history)).model(built.module, SHAPE)
        history.append(observe(replace(built, module=sent), image))
    found = attack(history)
    assert found.details == {"patches": 32, "rounds": 1}
    assert "32 of 64 patches were read" in found.diagnosis


@pytest.mark.parametrize(("name", "defense"), [("adapter_trap", "adapters"), ("lora_trap", "lora")])
def test_a_trap_vouches_for_nothing_of_a_batch(name: str, defense: str) -> None:
    chosen = DEFENSES.get(defense)()
    (found,) = rounds(ATTACKS.get(name)(), micro(chosen), photographs(32, 2), 1, chosen)
    assert "the batch holds 2 images" in found.diagnosis
    assert not found.known.any()


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("adapter_trap", "vit_micro_32", "no adapters behind the MLPs in 2 blocks"),
        ("lora_trap", "vit_micro_32", "no low-rank terms .LoRA. in the attentions in 3 blocks"),
        ("token_bins", "vit_micro_32_nope", "no learnable position embedding"),
        ("token_bins", "resnet_micro_32", "no patch projection"),
    ],
)
def test_models_that_cannot_be_set_are_refused(name: str, model: str, message: str) -> None:
    built = build_model(model, num_classes=10, weights="random")
    with pytest.raises(UsageError, match=message):
        ATTACKS.get(name)().send(before(built, SHAPE))


def test_tokens_that_lost_their_constants_are_left_out() -> None:
    """A coarse message rounds the two constants of some tokens to zero; here those of the first place."""
    built, images = micro(), photographs(32, 1)
    view = observe(replace(built, module=TokenBins().send(before(built, SHAPE)).model(built.module, SHAPE)), images)
    codes, name = codes_for(built.module, SHAPE), "blocks.0.mlp.fc1.weight"
    gradient = view.gradients[name].clone()
    gradient[: len(gradient) // 64, :2] = 0
    view = replace(view, gradients={**view.gradients, name: gradient})
    bins, _ = TokenBins().occupied(view, codes)
    assert not codes.patches(bins.inputs).isfinite().all()
    found = TokenBins()([view])
    assert found.images.isfinite().all()
    assert found.known.sum() == 63 * 16  # the other places, of 16 pixels
    assert psnr(found.images[..., :, 4:], images[..., :, 4:]) > 40


def test_patches_that_channels_are_too_few_for_are_not_vouched_for() -> None:
    """Of the 768 values of a patch a token of 192 channels holds 187; fine texture is not in the update."""
    built, images = build_model("vit_ti", num_classes=10, weights="random"), photographs(224, 8)
    codes = codes_for(built.module, (3, 224, 224))
    patches = codes.tokenizer.patchify(built.normalise(images)).flatten(0, 1).double()
    kept = patches @ codes.basis.T @ codes.basis
    error = max(built.std) * (kept - patches).square().mean(dim=1).sqrt()
    right, holds = error < 10**-1.25, codes.holds(kept, built.std)
    assert not holds[~right].any()
    assert int((~right).sum()) == 5
    assert int(holds.sum()) > 0.9 * len(holds)
    image = images[(~right).unflatten(0, (8, -1)).any(dim=1)][:1]
    (found,) = rounds(TokenBins(), built, image, 1)
    known = found.known[:, :, ::16, ::16]
    assert 0 < int(known.sum()) < known.numel()
    squares = functional.avg_pool2d((found.images - image).square().mean(dim=1, keepdim=True), 16)
    assert bool((squares[known] < 10**-2.5).all())
    assert not found.diagnosis
