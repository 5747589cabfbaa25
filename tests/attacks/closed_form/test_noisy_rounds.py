"""`noisy_rounds`: stacked updates against the unstacked systems, and what rounds give on photographs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.closed_form.noisy_rounds import growth, noise_of, same_image, stacked, whitened
from attacks.linear.errors_in_variables import RoundedSystem, marginal_misfit
from attacks.linear.position_rows import read_position_rows
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
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


@pytest.mark.parametrize("share", [1e-3, 1e-2])
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
    found = [noise_of(read_position_rows(noised(view, 1e-2, seed))) for seed in range(20)]
    assert sum(found) / 20 == pytest.approx(1e-2 * entry, rel=0.03)
    kept = {name: g for name, g in view.gradients.items() if name != "patch_embed.proj.bias"}
    bare = noised(dataclasses.replace(view, gradients=kept), 1e-4, 0)
    assert noise_of(read_position_rows(bare)) == pytest.approx(1e-4 * entry, rel=0.05)


def test_the_triangular_factor_says_what_all_updates_say(trained) -> None:
    """Three updates as three systems, channel by channel, against their one triangular factor."""
    image = photographs(32, 1)
    updates = [read_position_rows(view) for view in rounds(trained, image, 3, 1e-3)]
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
    images = photographs(32, 4)
    own = [read_position_rows(noised(observe(trained, images[:1]), share, seed)) for seed in (0, 1)]
    assert same_image(*own)
    for other in (images[1:2], images[2:3], images[3:4], images[:1].flip(-1)):
        assert not same_image(own[0], read_position_rows(noised(observe(trained, other), share, 2)))


def test_growth_of_pure_noise_is_one() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, generator=draws, dtype=torch.float64) * 30
    whole = torch.cat([torch.eye(6, dtype=torch.float64) * 30, x], dim=1)
    first, second = (
        torch.randn(40, 6, generator=draws, dtype=torch.float64) @ whole
        + torch.randn(40, 26, generator=draws, dtype=torch.float64)
        for _ in range(2)
    )
    assert growth(first, second, 6) == pytest.approx(1, abs=0.3)
    assert growth(first[:2], second[:2], 6) != growth(first[:2], second[:2], 6)  # NaN: too few rows


def test_what_stands_in_its_way() -> None:
    mask = torch.arange(64)[None] < 20
    model = build_model("vit_micro_32_mjp", num_classes=5, weights="random")
    views = [observe(model, photographs(32, 1)), observe(model, photographs(32, 1), mask=mask)]
    assert "shows no noise" in attack().obstacle(views[:1])
    assert "20 of 64 position rows" in attack().obstacle(views[1:])
    assert attack().obstacle([noised(views[0], 1e-3, 0)]) == ""
    batch = noised(observe(model, photographs(32, 2)), 1e-3, 0)
    assert "the batch holds 2 images" in attack()([batch]).diagnosis
