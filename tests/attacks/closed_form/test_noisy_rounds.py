"""`noisy_rounds`: stacked updates against the unstacked systems, and what rounds give on photographs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.closed_form.noisy_rounds import joined, stacked
from attacks.linear.errors_in_variables import RoundedSystem, correct, marginal_misfit
from attacks.linear.inexact_updates import predicts
from attacks.linear.noisy_update import noise_of, noisy_system, read_noisy_update, whitened
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.vit import ViT
from tests.conftest import observe, photographs

attack = ATTACKS.get("noisy_rounds")


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=10, weights="auto")


def noised(view: Observation, share: float, seed: int) -> Observation:
    """The update under `noise` in units of its own entries."""
    defence = DEFENSES.get("noise")(noise_multiplier=share, noise_unit="entry")
    sent = defence.on_update(dict(view.gradients), torch.Generator().manual_seed(seed))
    return dataclasses.replace(view, gradients=sent)


def rounds(trained: BuiltModel, image: torch.Tensor, count: int, share: float) -> list[Observation]:
    """A client's updates of one image, the weights moving by a step of 0.01 after each."""
    built = dataclasses.replace(trained, module=copy.deepcopy(trained.module))
    found = []
    for number in range(count):
        view = observe(built, image)
        found.append(noised(view, share, number))
        with torch.no_grad():
            for name, parameter in built.module.named_parameters():
                parameter -= 0.01 * view.gradients[name]
    return found


@pytest.mark.parametrize("share", [pytest.param(1e-3, marks=pytest.mark.long), 1e-2])
def test_updates_together_give_more_than_the_best_alone(trained, share: float) -> None:
    image = photographs(32, 1)
    views = rounds(trained, image, 8, share)
    alone = float(psnr(ATTACKS.get("patch_embedding")()(views[-1:]).images, image))
    one, eight = (attack()(views[-count:]) for count in (1, 8))
    assert (one.details["updates"], eight.details["updates"]) == (1, 8)
    assert eight.diagnosis == ""
    assert float(psnr(one.images, image)) > alone - 1
    # Averaging eight equal updates would give 9 dB.
    assert float(psnr(eight.images, image)) > alone + 10
    assert 0.8 < eight.details["misfit"] < 1.2
    wrong = ((eight.images - image).square().mean(dim=1, keepdim=True) > 1e-2) & eight.known
    assert not wrong.any()


def test_the_noise_is_read_from_the_message(trained) -> None:
    view = observe(trained, photographs(32, 1))
    size = view.gradient_norm()
    assert size > 1  # so that the defence clips it to 1
    entry = sum(g.numel() for g in view.gradients.values()) ** -0.5
    found = [noise_of(read_noisy_update(noised(view, 1e-2, seed))) for seed in range(20)]
    assert sum(found) / 20 == pytest.approx(1e-2 * entry, rel=0.03)
    kept = {name: g for name, g in view.gradients.items() if name != "patch_embed.proj.bias"}
    bare = noised(dataclasses.replace(view, gradients=kept), 1e-4, 0)
    assert noise_of(read_noisy_update(bare)) == pytest.approx(1e-4 * entry, rel=0.05)


def test_the_triangular_factor_says_what_all_updates_say(trained) -> None:
    """Three updates as three systems, channel by channel, against their one triangular factor."""
    image = photographs(32, 1)
    updates = [read_noisy_update(view) for view in rounds(trained, image, 3, 1e-3)]
    tokenizer = updates[0].tokenizer
    apart = []
    for update in updates:
        whole = whitened(update)
        g, s = whole[:, :64].T, whole[:, 64:]
        apart.append(RoundedSystem(g, torch.full_like(g, 3**0.5), s, torch.full_like(s, 3**0.5)))
    near = tokenizer.patchify(image.double())[0]  # any patches do
    parts = [marginal_misfit(system, near) for system in apart]
    misfit, gradient = marginal_misfit(stacked(updates), near)
    assert misfit == pytest.approx(sum(part for part, _ in parts), rel=1e-6)
    slow = sum(own for _, own in parts)
    torch.testing.assert_close(gradient, slow, rtol=1e-5, atol=1e-6 * float(slow.abs().max()))
    assert (stacked(updates).products.shape[0], stacked(updates).channels) == (64 + 49, 3 * 192)


@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 1e-1])
def test_updates_of_other_images_are_left_out(trained, share: float) -> None:
    """Of the same photograph mirrored, too."""
    images = photographs(32, 4)
    last, own = (read_noisy_update(noised(observe(trained, images[:1]), share, seed)) for seed in (0, 1))
    start = torch.zeros(64, last.tokenizer.patch_dim, dtype=torch.float64)
    known = correct([stacked([last])], start, last.tokenizer, trained.std, attack().prior).patches
    assert predicts(known, noisy_system(own), own.tokenizer)
    for other in (images[1:2], images[2:3], images[3:4], images[:1].flip(-1)):
        update = read_noisy_update(noised(observe(trained, other), share, 2))
        assert not predicts(known, noisy_system(update), own.tokenizer)


def test_a_server_that_knows_takes_every_update(trained) -> None:
    """Noise as large as the update itself leaves nothing that predicts another one."""
    views = [noised(observe(trained, photographs(32, 1)), 1.0, seed) for seed in range(3)]
    assert attack()(views).details["updates"] == 1
    assert attack(one_image=True)(views).details["updates"] == 3


def test_exact_updates_settle_more_patches_than_channels_together() -> None:
    torch.manual_seed(0)
    module = ViT(img_size=32, patch_size=4, embed_dim=48, depth=1, num_heads=4, num_classes=10).eval()
    narrow = BuiltModel(module, "narrow", "standard", 32, 4, (0.5,) * 3, (0.25,) * 3, "random")
    image, named = photographs(32, 1), ATTACKS.get("patch_embedding")
    views = rounds(narrow, image, 3, 0.0)
    assert "the only one" in attack().obstacle(views[:1])
    assert attack().obstacle(views) == ""
    assert "noisy_rounds several" in ATTACKS.get("mjp_rounds")().obstacle(views)
    alone, found = named()(views[-1:]), attack()(views)
    assert found.details["updates"] == 3
    assert found.diagnosis == ""
    assert found.known.all()
    assert float(psnr(found.images, image)) > 60 > 40 > float(psnr(alone.images, image))


@pytest.fixture(scope="module")
def masked() -> list[Observation]:
    """Six jigsawed steps of one photograph, gamma 0.1, and two of another one, without noise."""
    model, draws = build_model("vit_mini_32_mjp", num_classes=10, weights="auto"), torch.Generator().manual_seed(3)
    mjp, images = DEFENSES.get("mjp")(gamma=0.1), photographs(32, 2)
    seen = [mjp.on_input(images[number : number + 1], model, draws, 1) for number in (0, 0, 0, 0, 0, 0, 1, 1)]
    return [observe(model, one.images, torch.tensor([2]), one.position_mask) for one in seen]


@pytest.mark.parametrize("share", [pytest.param(1e-3, marks=pytest.mark.long), 1e-2])
def test_masked_updates_are_joined_where_attacks_on_masks_fail(masked, share: float) -> None:
    image = photographs(32, 1)
    views = [noised(view, share, number) for number, view in enumerate(masked)]
    one_image = views[6:] + views[:6]
    known = max(float(psnr(ATTACKS.get(name)()(one_image).images, image)) for name in ("mjp_subspace", "mjp_rounds"))
    found = attack()(one_image)
    assert (found.details["updates"], found.details["masked"]) == (6, 6)
    assert float(psnr(found.images, image)) > known + 6
    assert not found.known.any()  # nothing is vouched for
    alone = attack()(one_image[-1:])
    assert float(psnr(found.images, image)) > float(psnr(alone.images, image)) + 3


def test_masks_below_the_noise_leave_equations_that_hold_and_vouch_for_nothing(masked) -> None:
    found = attack()([noised(view, 0.3, number) for number, view in enumerate(masked[:6])])
    assert found.details["masked"] == 0
    assert found.details["misfit"] < 1.05
    assert not found.known.any()


@pytest.mark.long
def test_masked_and_plain_updates_of_one_image_add_up(masked) -> None:
    """A client that jigsaws every other step."""
    built, image = build_model("vit_mini_32_mjp", num_classes=10, weights="auto"), photographs(32, 1)
    plain = [noised(observe(built, image, torch.tensor([2])), 1e-2, 40 + number) for number in range(2)]
    views = [plain[0], noised(masked[0], 1e-2, 0), plain[1], noised(masked[1], 1e-2, 1)]
    updates = [read_noisy_update(view) for view in views]
    assert [system.hidden is None for system in joined(updates)] == [True, False, False]
    best = float(psnr(attack()(views).images, image))
    for fewer in (views[:1], views[1::2]):
        assert best > float(psnr(attack()(fewer).images, image))


def test_what_stands_in_its_way() -> None:
    mask = torch.arange(64)[None] < 20
    model = build_model("vit_micro_32_mjp", num_classes=5, weights="random")
    views = [observe(model, photographs(32, 1)), observe(model, photographs(32, 1), mask=mask)]
    assert "shows no noise" in attack().obstacle(views[:1])
    assert "shows no noise: mjp_subspace" in attack().obstacle(views[1:])
    assert "shows no noise: mjp_rounds" in attack().obstacle(views[1:] * 2)
    wide = observe(build_model("vit_mini_32", num_classes=5, weights="random"), photographs(32, 1))
    assert "settles all 64 patches" in attack().obstacle([wide, wide])
    sent = views[1].gradients["pos_embed"].clone()
    sent[:, 1:] = 0
    every = dataclasses.replace(views[1], gradients={**views[1].gradients, "pos_embed": sent})
    assert "position rows are exactly zero" in attack().obstacle([every])
    assert "position rows are exactly zero" in attack()([every]).diagnosis
    most = observe(model, photographs(32, 1), mask=torch.arange(64)[None] < 49)
    assert "patches have 49 values: what is hidden may be anything" in attack().obstacle([noised(most, 1e-4, 0)])
    assert attack().obstacle([noised(views[0], 1e-3, 0)]) == ""
    batch = noised(observe(model, photographs(32, 2)), 1e-3, 0)
    assert "the batch holds 2 images" in attack()([batch]).diagnosis
