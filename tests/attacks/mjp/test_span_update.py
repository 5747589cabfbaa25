"""MJP without position gradient: mask and equations from the first attention, against the truth and dense algebra."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attacks import ATTACKS, Observation, UsageError
from attacks.memory import remember
from attacks.mjp.joined_updates import join_updates
from attacks.mjp.span_update import read_span_update
from fedmjp.metrics import psnr
from tests.attacks.mjp.test_mjp_subspace import jigsawed, patches_of
from tests.conftest import photographs

UPDATES = 4


def withheld(view: Observation) -> Observation:
    kept = {n: g for n, g in view.gradients.items() if n not in ("pos_embed", "unk_embed")}
    return dataclasses.replace(view, gradients=kept)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return photographs(64, 3)[2:].double()


@pytest.fixture(scope="module")
def views(models, image) -> list[Observation]:
    return [withheld(jigsawed(m, image, 0.2, seed=i)) for i, m in enumerate(models)]


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.4])
def test_mask_and_equations_are_the_true_ones(models, image, gamma: float) -> None:
    sent = jigsawed(models[0], image, gamma)
    read = read_span_update(withheld(sent))
    assert torch.equal(read.masked, (sent.gradients["pos_embed"][0, 1:] == 0).all(dim=1))
    x, update = patches_of(models[0], image), read.solved
    assert update.reasons == ()
    off = (update.rows - x) - (update.rows - x) @ update.basis.T @ update.basis
    assert float(off.abs().max()) < 1e-3  # off the open directions right at all places, masked ones too
    assert float(update.equations().misfit(x).sum() / update.equations().squares.sum()) < 1e-6
    hidden = x[read.masked] - x[read.masked].mean(dim=0) if gamma else x[:0]
    outside = hidden - hidden @ update.basis.T @ update.basis
    assert float(outside.norm()) <= 1e-3 * float(hidden.norm())


def test_earlier_updates_that_spans_alone_read_are_no_obstacle(models, image) -> None:
    last = jigsawed(models[3], image, 0.2, seed=3)
    updates = [withheld(jigsawed(models[0], image, 0.2, seed=0)), last]
    assert join_updates(updates, spans=True).equations.updates == 2
    assert ATTACKS.get("mjp_rounds")().obstacle(updates) == ""


def test_rows_agree_with_dense_algebra(models, image) -> None:
    """The oracle takes null spaces of the gradients and solves for a patch and its scale in one dense system."""
    view = withheld(jigsawed(models[1], image, 0.1, seed=3))
    read = read_span_update(view)
    weights = {n: p.detach().numpy() for n, p in view.model.named_parameters()}
    qkv = np.hstack([view.gradients[f"blocks.0.attn.qkv.{k}"].numpy().reshape(576, -1) for k in ("weight", "bias")])
    projection = np.hstack(
        [view.gradients[f"patch_embed.proj.{k}"].numpy().reshape(192, -1) for k in ("weight", "bias")]
    )
    tokens, patches = np.linalg.svd(qkv)[2][65:], np.linalg.svd(projection)[2][64:]  # conditions, (n, 193)
    gamma, beta = weights["blocks.0.norm1.weight"], weights["blocks.0.norm1.bias"]
    centre = np.eye(192) - 1 / 192
    e = weights["patch_embed.proj.weight"].reshape(192, -1)
    place = int((~read.masked).nonzero()[5])
    constant = weights["patch_embed.proj.bias"] + weights["pos_embed"][0, 1 + place]
    scale = tokens[:, :-1] @ beta + tokens[:, -1]
    left = np.block(
        [[tokens[:, :-1] @ (gamma[:, None] * (centre @ e)), scale[:, None]], [patches[:, :-1], 0 * patches[:, -1:]]]
    )
    right = -np.concatenate([tokens[:, :-1] @ (gamma * (centre @ constant)), patches[:, -1]])
    oracle = np.linalg.lstsq(left, right, rcond=1e-9)[0][:-1]
    basis = read.solved.basis.numpy()
    difference = read.solved.rows[place].numpy() - oracle
    np.testing.assert_allclose(difference - basis.T @ (basis @ difference), 0, atol=1e-3)


def test_rounds_recover_the_image(views, image) -> None:
    found = ATTACKS.get("mjp_rounds")()([*map(remember, views[:-1]), views[-1]])
    assert found.diagnosis == ""
    assert found.details["updates"] == UPDATES
    assert float(psnr(found.images, image.float())) > 50
    assert ATTACKS.get("mjp_rounds")().obstacle(views) == ""


def test_updates_with_and_without_position_gradient_are_joined(models, views, image) -> None:
    sent = jigsawed(models[0], image.flip(-1), 0.2, seed=8)
    joined = join_updates([sent, *views[:2]], spans=True)
    assert (joined.equations.updates, joined.changed) == (3, 1)
    x = patches_of(models[0], image)
    assert float(joined.equations.misfit(x).sum() / joined.equations.squares.sum()) < 1e-6


def test_noise_that_hides_the_mask_is_named(views) -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: g + 0.05 * g.square().mean().sqrt() * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for n, g in views[0].gradients.items()
    }
    found = ATTACKS.get("mjp_rounds")()([dataclasses.replace(views[0], gradients=noisy)])
    assert found.diagnosis
    assert found.known is None or not found.known.any()


def test_what_is_missing_is_named(views) -> None:
    gone = {n: g for n, g in views[0].gradients.items() if "qkv" not in n}
    with pytest.raises(UsageError, match="holds no gradient of blocks.0.attn.qkv"):
        read_span_update(dataclasses.replace(views[0], gradients=gone))
    found = ATTACKS.get("mjp_rounds")()([dataclasses.replace(views[0], gradients=gone)])
    assert "no position gradient, and without one" in found.diagnosis
