"""A server that knows the client's seed: noise is subtracted, moved patches are put back; without it neither is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import ATTACKS, Capability, ThreatModel, UsageError
from attacks.closed_form.known_draws import KnownDraws, without_noise
from attacks.observation import Drawn
from fedmjp.audit.drawn import drawn_by
from fedmjp.client import ClientTask
from fedmjp.metrics import psnr
from tests.defenses.clients import Update, update_under

CLIPPED = "clip_norm=1.0,noise_multiplier=0.01"


def known(update: Update):
    """The observation with what the auditor draws again."""
    drawn = drawn_by(update.task, update.view, update.view, update.task.batch(0, 1, 0))
    return dataclasses.replace(update.view, drawn=drawn)


def exact_update(update: Update, defense: str) -> dict[str, torch.Tensor]:
    """What the same client sends under another defence, by name."""
    task = ClientTask(update.task.config, defense)
    task.load({n: t.clone() for n, t in (update.task.parameters | update.task.buffers).items()})
    return task.update(0, 1, {n: t.detach().clone() for n, t in (task.parameters | task.buffers).items()}).tensors


@pytest.mark.parametrize(("options", "error"), [(CLIPPED, 1e-6), ("noise_unit=entry,noise_multiplier=0.5", 2e-2)])
def test_noise_is_subtracted(options: str, error: float) -> None:
    """Exactly where its deviation is ordered; by least squares where it depends on the update."""
    update = update_under(f"noise:{options}", "vit_mini_32")
    honest = exact_update(update, "noise:noise_multiplier=0")  # clipped alike
    left, before = without_noise(known(update)).gradients, update.view.gradients
    whole, rest, noise = (torch.cat([tensors[n].flatten() for n in before]) for tensors in (honest, left, before))
    assert (rest - whole).norm() < error * (noise - whole).norm()


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
