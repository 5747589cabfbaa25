"""Hidden spans with more patches than channels, from differences of updates: against the masked patches themselves."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS
from attacks.linear.completed_spans import complete_spans, completes
from attacks.linear.masked_update import MaskedUpdate, solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.observation import Observation
from attacks.tokenizer import find_tokenizer
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel
from fedmjp.models.vit import ViT
from tests.attacks.mjp.test_mjp_subspace import jigsawed
from tests.conftest import photographs

SIZE, WIDTH = 64, 60  # pixels: 64 patches of 192 values; channels


def models(count: int, dtype: torch.dtype = torch.float32) -> list[BuiltModel]:
    """One a round, with weights of their own."""
    built = []
    for seed in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
            module = ViT(unknown_position=True, dal="linear", num_classes=8, **sizes)
        built.append(BuiltModel(module, "narrow", "standard", SIZE, 8, (0.5,) * 3, (0.25,) * 3, "random"))
        built[-1].module.to(dtype)
    return built


def updates(image: torch.Tensor, count: int, first: int = 0) -> list[Observation]:
    """MJP steps that hide 10 patches each, in the image's type."""
    return [jigsawed(model, image, 0.15, seed=seed) for seed, model in enumerate(models(count, image.dtype), first)]


def solved(views: list[Observation]) -> list[MaskedUpdate]:
    return [solve_masked(read_position_rows(view)) for view in views]


@pytest.fixture(scope="module")
def views() -> list[Observation]:
    return updates(photographs(SIZE, 2)[:1], 6)


def attack(views: list[Observation]):
    return ATTACKS.get("mjp_rounds")()(views)


def test_a_single_update_shows_a_part_of_the_span(views) -> None:
    for update in solved(views):
        assert update.narrow
        assert len(update.basis) < int(update.masked.sum()) - 1
        assert "needs more channels than patches, here 60 and 64" in update.reasons[0]


@pytest.mark.parametrize("count", [3, 6])
def test_completed_spans_hold_the_differences_of_the_masked_patches(count: int) -> None:
    model, image = models(1)[0], photographs(SIZE, 2)[:1].double()
    patches = find_tokenizer(model.module, (3, SIZE, SIZE)).patchify(model.normalise(image))[0]
    before = solved(updates(image, count))
    for narrow, completed in zip(before, complete_spans(before), strict=True):
        hidden = patches[narrow.masked]
        own = torch.linalg.qr((hidden[1:] - hidden[0]).T).Q  # the oracle, (P, h - 1)
        assert torch.linalg.svdvals(narrow.basis @ own)[: len(narrow.basis) - 1].min() > 0.999
        assert torch.linalg.svdvals(completed.basis @ own).min() > 1 - 1e-6  # all of it is inside
        right = completed.rows - patches
        outside = right - (right @ completed.basis.T) @ completed.basis
        assert outside[~narrow.masked].abs().max() < 1e-6  # and what is left of the rows is right
        assert completed.reasons == ()


def test_whole_image_where_one_update_is_far_from_it(views) -> None:
    image = photographs(SIZE, 2)[:1]
    alone, joined = attack(views[-1:]), attack(views)
    assert float(psnr(alone.images, image)[0]) < 25
    assert "needs more channels than patches" in alone.diagnosis
    assert joined.diagnosis == ""
    assert joined.details["updates"] == 6
    assert joined.known.all()
    assert float(psnr(joined.images, image)[0]) > 50


def test_two_updates_are_too_few(views) -> None:
    found = attack(views[-2:])
    assert "3 updates of the image would show all of them, and 2 were found" in found.diagnosis
    assert not found.known.any()


def test_updates_of_other_images_are_left_out(views) -> None:
    others = updates(photographs(SIZE, 2)[1:], 4, first=6)
    (last, *earlier), strange = solved(views), solved(others)
    assert all(completes(last, update) for update in earlier)
    assert not any(completes(last, update) for update in strange)
    assert attack([*others, *views]).details["updates"] == 6


def test_repeated_updates_and_masks_spoil_nothing(views) -> None:
    """A pair of the same mask and weights differs in nothing, and would take its own directions for known."""
    image, (model, *_) = photographs(SIZE, 2)[:1], models(1)
    nearly = jigsawed(model, image, 0.15, seed=0)  # the mask and the weights of the first
    for views_again in ([views[0], *views], [*views, views[-1]], [nearly, *views[1:], views[2], views[5]]):
        found = attack(views_again)
        assert found.diagnosis == ""
        assert float(psnr(found.images, image)[0]) > 50


def test_mirrored_updates_are_joined(views) -> None:
    image = photographs(SIZE, 2)[:1]
    mirrored = updates(image.flip(-1), 6)[:3]
    found = attack([*mirrored, *views[3:]])
    assert (found.details["updates"], found.details["changed"]) == (6, 3)
    assert float(psnr(found.images, image)[0]) > 50


def test_narrow_updates_are_not_mixed_with_unmasked_ones(views) -> None:
    whole = jigsawed(models(1)[0], photographs(SIZE, 2)[:1], 0.0)
    assert attack([whole, *views]).details["updates"] == 6
