"""Noise in updates that lack the gradient of the patch projection's bias: where it shows, and what is vouched for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.linear.position_rows import read_position_rows
from fedmjp.models import BuiltModel, build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed, narrow
from tests.conftest import observe, photographs

BIAS, KEYS = "patch_embed.proj.bias", "blocks.0.attn.qkv.bias"


def sent(view: Observation, noise: float = 0.0, without: tuple[str, ...] = (BIAS,), seed: int = 0) -> Observation:
    """The update with noise, in units of its rms entry, and without some of its gradients."""
    generator = torch.Generator().manual_seed(seed)
    size = noise * torch.cat([g.flatten() for g in view.gradients.values()]).square().mean().sqrt()
    noised = {n: g + size * torch.randn(g.shape, generator=generator) for n, g in view.gradients.items()}
    return dataclasses.replace(view, gradients={n: g for n, g in noised.items() if n not in without})


@pytest.fixture(scope="module")
def hiding() -> BuiltModel:
    return build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")


@pytest.mark.parametrize("gamma", [0.0, 0.2])
def test_noise_shows_in_the_spare_equations(hiding: BuiltModel, gamma: float) -> None:
    for number, image in enumerate(photographs(64, 2)):
        view = jigsawed(hiding, image[None], gamma, seed=number)
        assert [read_position_rows(sent(view, noise)).noisy for noise in (0.0, 1e-5, 1e-4)] == [False, True, True]


@pytest.mark.parametrize("width", [48, 60])
def test_with_more_patches_than_channels_noise_shows_in_the_first_attention(width: int) -> None:
    model = narrow(width)
    with torch.no_grad():  # the identity must not need a fresh norm
        model.module.blocks[0].norm1.weight.uniform_(0.5, 2)
        model.module.blocks[0].norm1.bias.normal_()
    for image in photographs(64, 2):
        view = observe(model, image[None])
        assert [read_position_rows(sent(view, noise)).noisy for noise in (0.0, 1e-5, 1e-4)] == [False, True, True]
        assert read_position_rows(sent(view, 1e-4, (BIAS, KEYS))).noisy is None


def test_patch_embedding_vouches_by_what_shows() -> None:
    model, image = narrow(60), photographs(64, 1)
    view, attack = observe(model, image), ATTACKS.get("patch_embedding")()
    whole, clean, noised, blind = (
        attack([one]) for one in (view, sent(view), sent(view, 1e-4), sent(view, without=(BIAS, KEYS)))
    )
    assert torch.equal(clean.known, whole.known)
    assert whole.known.any()
    assert not noised.known.any()
    assert not blind.known.any()
    assert (clean.diagnosis, "whether the update holds noise does not show" in blind.diagnosis) == ("", True)


@pytest.mark.parametrize("name", ["mjp_subspace", "mjp_rounds"])
def test_attacks_on_masked_updates_vouch_for_nothing_that_noise_reaches(hiding: BuiltModel, name: str) -> None:
    image = photographs(64, 1)
    views = [jigsawed(hiding, image, 0.1, seed=number) for number in range(2)]
    clean = ATTACKS.get(name)()([sent(view) for view in views])
    noised = ATTACKS.get(name)()([sent(view, 1e-4, seed=number) for number, view in enumerate(views)])
    assert clean.known.any()
    assert not noised.known.any()
