"""Which patches MJP masks: counts, an oracle of the attention, masks for life, mistakes, what a fixed mask stops."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS, UsageError
from fedmjp.audit.aggregate import SeenUpdate
from fedmjp.audit.originals import Originals
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from fedmjp.models.attention import every_attention
from tests.conftest import observe, photographs
from tests.defenses.clients import task_under, weights_of

PLAIN = {"gamma": 0.3, "dal": "none"}


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    return build_model("vit_mini_64_mjp", num_classes=200, weights="auto", dal="none")


def mask(model, images, seed: int = 0, round: int = 1, **options) -> torch.Tensor:
    defense = DEFENSES.get("mjp")(**PLAIN | options)
    defense.validate()
    return defense.on_input(images, model, draw(seed), round).position_mask


@pytest.mark.parametrize("choice", ["block", "random", "attention", "attended", "fixed"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_every_choice_masks_the_same_number(model, choice: str, gamma: float) -> None:
    found = mask(model, photographs(64, 3), gamma=gamma, mask_choice=choice)
    assert (found.sum(dim=1) == round(64 * gamma)).all()


def test_random_masks_hide_every_patch_alike() -> None:
    small = build_model("vit_micro_32_mjp", num_classes=4, weights="random", dal="none")
    shares = mask(small, torch.zeros(4000, 3, 32, 32), mask_choice="random").double().mean(dim=0)
    deviation = (19 / 64 * 45 / 64 / 4000) ** 0.5
    assert float((shares - 19 / 64).abs().max()) < 4.5 * deviation


@pytest.mark.parametrize("choice", ["attention", "attended"])
def test_attention_is_the_last_block_s_of_the_ordered_image(model, choice: str) -> None:
    images = photographs(64, 2)
    model.module.train()
    found = mask(model, images, mask_choice=choice)
    assert model.module.training
    maps = every_attention(model, images)[-1]  # (B, heads, T, T)
    for row, image in zip(found, maps, strict=True):
        by_patch = {place: sum(float(head[0, 1 + place]) for head in image) for place in range(64)}
        ranked = sorted(by_patch, key=by_patch.get, reverse=choice == "attended")
        assert set(row.nonzero().flatten().tolist()) == set(ranked[:19])


def test_a_fixed_mask_is_the_image_s_and_the_client_s(model) -> None:
    images = photographs(64, 3)
    first = mask(model, images, mask_choice="fixed")
    assert torch.equal(first, mask(model, images, seed=7, round=5, mask_choice="fixed"))
    assert torch.equal(first[[2, 0]], mask(model, images[[2, 0]], mask_choice="fixed"))
    assert torch.equal(first, mask(model, images.double(), mask_choice="fixed"))
    assert len({tuple(row.tolist()) for row in first}) == 3
    assert not torch.equal(first, mask(model, images, mask_choice="fixed", mask_key=1))
    assert not torch.equal(first, mask(model, images.flip(3), mask_choice="fixed"))
    mjp = DEFENSES.get("mjp")(**PLAIN, mask_choice="fixed")
    orders = [mjp.on_input(images, model, draw(seed), 1).images for seed in range(2)]
    assert not torch.equal(*orders)  # the jigsaw is drawn anew


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_choice": "random", "mask_sampler": "released"}, "--mask-sampler released draws blocks"),
        ({"mask_choice": "attention", "jigsaw_per": "batch"}, "masks each image by itself; drop --jigsaw-per batch"),
        ({"mask_choice": "fixed", "jigsaw_per": "batch"}, "masks each image by itself"),
        ({"mask_choice": "fixed", "mask_key": -1}, "--mask-key must lie in"),
    ],
)
def test_options_that_do_not_go_together(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        DEFENSES.get("mjp")(**options).validate()
    assert "\n" not in str(error.value)


def test_attention_asks_a_vit() -> None:
    with pytest.raises(UsageError, match="asks a class token, and resnet50 has none; name a ViT"):
        DEFENSES.get("mjp")(mask_choice="attended").model_name("resnet50")


@pytest.mark.parametrize("choice", ["block", "fixed"])
def test_a_fixed_mask_stops_adding_up_updates(model, choice: str) -> None:
    """Three updates of one photograph: with masks drawn anew they show it, with one for life no more than the first."""
    image, mjp = photographs(64, 2)[1:], DEFENSES.get("mjp")(**PLAIN | {"gamma": 0.2}, mask_choice=choice)
    seen = [mjp.on_input(image, model, draw(seed), 1) for seed in range(3)]
    views = [observe(model, one.images, mask=one.position_mask) for one in seen]
    found = [ATTACKS.get("mjp_rounds")()(views[:count]) for count in (1, 3)]
    first, last = (float(psnr(one.images, image)) for one in found)
    if choice == "fixed":
        assert last < first + 1
    else:
        assert last > first + 15


def test_the_auditor_draws_a_mask_with_the_weights_that_the_client_was_sent() -> None:
    task = task_under("mjp:gamma=0.5,mask_choice=attention", weights="random")
    sent, originals = weights_of(task), Originals(task, simulated=True)
    view = SeenUpdate(round=1, client=0, members=(0,), sent=sent, received={})
    _, seen = originals.batch(view)
    generator = torch.Generator().manual_seed(1)
    task.load({name: torch.randn(t.shape, generator=generator) for name, t in sent.items()})
    assert not torch.equal(task.seen(task.batch(0, 1, 0), 0, 1, 0).images, seen)  # of a client that was sent others
    assert torch.equal(originals.batch(view)[1], seen)
