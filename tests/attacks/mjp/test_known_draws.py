"""A server that knows the client's seed: noise is subtracted, moved patches are put back; without it neither is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Capability, ThreatModel, UsageError
from attacks.mjp.known_draws import KnownDraws, without_noise
from attacks.observation import Drawn
from fedmjp.audit.drawn import drawn_by
from fedmjp.metrics import psnr
from tests.defenses.clients import Update, update_under

CLIPPED = "clip_norm=1.0,noise_multiplier=0.01"
OF_AN_ENTRY = ("noise_unit=entry,noise_multiplier=0.5", "noise_unit=entry,noise_multiplier=3")


def known(update: Update):
    """The observation with what the auditor draws again."""
    drawn = drawn_by(update.task, update.view, update.view, update.task.batch(0, 1, 0))
    return dataclasses.replace(update.view, drawn=drawn)


@pytest.mark.parametrize("kind", ["gradient", "weights"])
@pytest.mark.parametrize("options", [CLIPPED, *OF_AN_ENTRY])
def test_noise_is_subtracted(options: str, kind: str) -> None:
    """Where its deviation is ordered, and where it depends on the update."""
    update = update_under(f"noise:{options}", "vit_mini_32", update=kind)
    honest = update_under("noise:noise_multiplier=0", "vit_mini_32", update=kind).view.gradients  # clipped alike
    left, before = without_noise(known(update)).gradients, update.view.gradients
    whole, rest, noise = (torch.cat([tensors[n].flatten() for n in before]) for tensors in (honest, left, before))
    assert (rest - whole).norm() < 1e-3 * (noise - whole).norm()


@pytest.mark.parametrize(
    ("kind", "beside"), [("gradient", ""), ("weights", ""), ("gradient", "+withheld:withhold=head")]
)
def test_the_noise_of_dp_sgd_hides_no_image_from_who_draws_it_again(kind: str, beside: str) -> None:
    update = update_under(f"dp_sgd:dp_noise_multiplier=1{beside}", "vit_mini_32", update=kind)
    assert float(psnr(ATTACKS.get("patch_embedding")()([update.view]).images, update.original)) < 15
    found = KnownDraws()([known(update)])
    assert float(psnr(found.images, update.original)) > 40
    assert found.diagnosis == ""
    two = dataclasses.replace(update, view=dataclasses.replace(update.view, local_steps=2))
    assert "neither noise nor an order that can be undone" in KnownDraws().obstacle([known(two)])


@pytest.mark.parametrize("defense", [f"noise:{CLIPPED}+withheld:withhold=head", "ats:ats_policy=3-1-7"])
def test_a_part_that_freezes_hides_no_noise_and_pixels_that_move_have_no_order(defense: str) -> None:
    drawn = known(update_under(defense, "vit_mini_32")).drawn
    assert bool(drawn.noise) == defense.startswith("noise")
    assert not any(name.startswith("head") for name in drawn.noise)
    assert drawn.order is None


@pytest.mark.parametrize("defense", ["noise+quantise", "dp_sgd+noise", "topk:topk_choice=random"])
def test_what_cannot_be_drawn_again_is_not_called_nothing(defense: str) -> None:
    view = known(update_under(defense, "vit_mini_32"))
    assert "neither noise nor an order that can be undone" in KnownDraws().obstacle([view])


def test_an_image_behind_noise_is_recovered_with_the_seed_alone() -> None:
    update = update_under(f"noise:{CLIPPED}", "vit_mini_32")
    blind = ATTACKS.get("patch_embedding")()([update.view])
    found = KnownDraws()([known(update)])
    assert float(psnr(blind.images, update.original)) < 25
    assert float(psnr(found.images, update.original)) > 40
    assert found.diagnosis == ""
    assert found.details["noise_norm"] > 1


def test_patches_are_put_back_in_their_places() -> None:
    """JP, the jigsaw with every position shown: a plain inversion gives the shuffled image."""
    update = update_under("mjp:gamma=0.5,positions=own,dal=none", "vit_mini_32")
    view = known(update)
    back = view.drawn.order[0].argsort()
    assert torch.equal(_moved(update.seen, back), update.original)  # the order is the defence's own
    blind, found = ATTACKS.get("patch_embedding")()([view]), KnownDraws()([view])
    assert torch.equal(found.images, _moved(blind.images, back))
    assert float(psnr(blind.images, update.original)) < 25
    assert float(psnr(found.images, update.original)) > 40


def test_the_order_of_hidden_patches_is_in_no_update() -> None:
    """MJP's patches share one embedding: an update of the same patches in another order is the same."""
    update = update_under("mjp:gamma=0.5", "vit_mini_32")
    view = known(update)
    assert torch.equal(KnownDraws()([view]).images, ATTACKS.get("mjp_subspace")()([view]).images)


def _moved(image: torch.Tensor, back: torch.Tensor, size: int = 4) -> torch.Tensor:
    """Patch by patch, in a loop."""
    moved, columns = torch.empty_like(image), image.shape[-1] // size
    for place, source in enumerate(back.tolist()):
        (y, x), (v, u) = divmod(place, columns), divmod(source, columns)
        moved[..., y * size : y * size + size, x * size : x * size + size] = image[
            ..., v * size : v * size + size, u * size : u * size + size
        ]
    return moved


def test_it_needs_its_capability_and_says_where_it_adds_nothing() -> None:
    with pytest.raises(UsageError, match="client_seed"):
        KnownDraws().require(ThreatModel(), "known_draws")
    KnownDraws().require(ThreatModel(ThreatModel().grants | {Capability.CLIENT_SEED}), "known_draws")
    view = update_under("none", "vit_mini_32").view
    assert "patch_embedding gives the same answer" in KnownDraws().obstacle([view])
    assert "patch_embedding gives the same answer" in KnownDraws().obstacle([dataclasses.replace(view, drawn=Drawn())])
