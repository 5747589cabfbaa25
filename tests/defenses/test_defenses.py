"""Every defence: options, hooks, and what the model sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from attacks import UsageError
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from tests.conftest import photographs


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def mjp_model():
    return build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="linear")


@pytest.mark.parametrize("name", list(DEFENSES))
def test_hooks_keep_shapes_and_repeat(name: str, mjp_model) -> None:
    defense = DEFENSES.get(name)()
    defense.validate()
    images = photographs(64, 3)
    first, second = (defense.on_input(images, mjp_model, draw(), 1) for _ in range(2))
    assert first.images.shape == images.shape
    assert torch.equal(first.images, second.images)
    update = {"pos_embed": torch.randn(1, 65, 4), "w": torch.randn(7)}
    sent, again = (defense.on_update({n: t.clone() for n, t in update.items()}, draw()) for _ in range(2))
    assert all(torch.equal(sent[n], again[n]) and sent[n].shape == update[n].shape for n in update)


def test_none_changes_nothing(mjp_model) -> None:
    images = photographs(64, 2)
    seen = DEFENSES.get("none")().on_input(images, mjp_model, draw(), 1)
    assert seen.images is images
    assert seen.position_mask is None


def test_mjp_shows_the_same_patches_elsewhere(mjp_model) -> None:
    images = photographs(64, 3)
    seen = DEFENSES.get("mjp")(gamma=0.5).on_input(images, mjp_model, draw(), 1)
    before, after = (F.unfold(x, 8, stride=8) for x in (images, seen.images))
    visible = ~seen.position_mask
    assert (visible.sum(dim=1) == 32).all()
    assert torch.equal(before.transpose(1, 2)[visible], after.transpose(1, 2)[visible])
    assert not torch.equal(before, after)
    torch.testing.assert_close(before.sum(dim=2), after.sum(dim=2))


def test_mjp_one_mask_for_the_batch(mjp_model) -> None:
    seen = DEFENSES.get("mjp")(gamma=0.5, jigsaw_per="batch").on_input(photographs(64, 3), mjp_model, draw(), 1)
    assert (seen.position_mask == seen.position_mask[0]).all()


def test_mjp_warmup_and_probability(mjp_model) -> None:
    images = photographs(64, 1)
    mjp = DEFENSES.get("mjp")(jigsaw_warmup=2, jigsaw_probability=0.5)
    assert mjp.on_input(images, mjp_model, draw(), 2).position_mask is None
    hidden = [mjp.on_input(images, mjp_model, draw(s), 3).position_mask is not None for s in range(200)]
    assert 70 < sum(hidden) < 130


@pytest.mark.parametrize("name", ["vit_mini_64_nope", "resnet50"])
def test_mjp_without_positions_only_jigsaws(name: str) -> None:
    model = build_model(name, num_classes=8, weights="random")
    images = photographs(model.image_size, 1)
    seen = DEFENSES.get("mjp")(gamma=0.9).on_input(images, model, draw(), 1)
    assert seen.position_mask is None
    assert not torch.equal(seen.images, images)


@pytest.mark.parametrize(
    ("given", "trained"),
    [("deit_s", "deit_s_mjp"), ("deit_s_nope", "deit_s_nope"), ("deit_s_mjp", "deit_s_mjp"), ("swin_t", "swin_t")],
)
def test_mjp_picks_the_model(given: str, trained: str) -> None:
    assert DEFENSES.get("mjp")().model_name(given) == trained


def test_noise_clips_then_adds() -> None:
    noise = DEFENSES.get("noise")
    update = {"a": torch.full((3, 4), 2.0), "b": torch.full((5,), -1.0)}
    clipped = noise(clip_norm=0.5, noise_multiplier=0.0).on_update(update, draw())
    norm = torch.cat([t.flatten() for t in clipped.values()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-5)
    many = noise(clip_norm=2.0, noise_multiplier=0.1).on_update({"a": torch.zeros(100_000)}, draw())
    assert float(many["a"].std()) == pytest.approx(0.2, rel=0.02)


def test_frozen_positions_sends_zeros() -> None:
    sent = DEFENSES.get("frozen_positions")().on_update({"pos_embed": torch.ones(2), "w": torch.ones(2)}, draw())
    assert not sent["pos_embed"].any()
    assert sent["w"].all()


BAD = [
    ("mjp", {"gamma": 1.5}, r"--gamma must lie in \[0, 1\]"),
    ("mjp", {"gamma": -0.1}, r"--gamma"),
    ("mjp", {"gamma": float("nan")}, r"--gamma"),
    ("mjp", {"jigsaw_probability": 2.0}, "--jigsaw-probability"),
    ("mjp", {"dal_weight": -1.0}, "--dal-weight"),
    ("noise", {"clip_norm": 0.0}, "--clip-norm"),
]


@pytest.mark.parametrize(("name", "options", "words"), BAD)
def test_options_out_of_range(name: str, options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DEFENSES.get(name)(**options).validate()


def test_options_are_unique_across_defences() -> None:
    """They share one flat command line."""
    names = [f.name for name in DEFENSES for f in dataclasses.fields(DEFENSES.get(name))]
    assert len(names) == len(set(names))
