"""ATS against transformations written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attacks import UsageError
from attacks.policies import LIBRARY, read_policies
from attacks.transformations import OPERATIONS, transform_images
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import photographs
from tests.defenses.clients import task_under, update_under, weights_of


def moved(pixels: np.ndarray, x: int, y: int) -> np.ndarray:
    """What stood x pixels to the right and y below, black where nothing did."""
    height, width = pixels.shape[:2]
    result = np.zeros_like(pixels)
    for row in range(height):
        for column in range(width):
            if 0 <= row + y < height and 0 <= column + x < width:
                result[row, column] = pixels[row + y, column + x]
    return result


def blended(pixels: np.ndarray, ground: np.ndarray | float, factor: float) -> np.ndarray:
    return np.clip(ground + factor * (pixels - ground), 0, 255)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.round(pixels @ [0.299, 0.587, 0.114])


# (operation, level) -> the transformation with a positive sign, of (H, W, 3) in 0 ... 255.
BY_HAND = {
    ("invert", 7): lambda x: 255 - x,
    ("solarize", 4): lambda x: np.where(x < 256 - 256 * 4 / 9, x, 255 - x),
    ("posterize", 5): lambda x: x // 4 * 4,  # 8 - 4 * 5 / 9 = 5.8, to 6 bits
    ("translate_x", 9): lambda x: moved(x, round(150 / 331 * 64), 0),
    ("translate_y", 2): lambda x: moved(x, 0, round(150 / 331 * 2 / 9 * 64)),
    ("brightness", 9): lambda x: blended(x, 0.0, 1.5),
    ("contrast", 6): lambda x: blended(x, float(int(grey(x).mean() + 0.5)), 1 + 0.5 * 6 / 9),
    ("color", 3): lambda x: blended(x, grey(x)[..., None], 1 + 0.5 * 3 / 9),
}


@pytest.mark.parametrize(("name", "level"), list(BY_HAND))
def test_operations_are_those_of_the_released_code(name: str, level: int) -> None:
    from PIL import Image

    pixels = photographs(64, 1)[0].mul(255).round().byte().permute(1, 2, 0).numpy()
    found = np.array(OPERATIONS[name](Image.fromarray(pixels), level, 1)).astype(float)
    expected = BY_HAND[name, level](pixels.astype(float))
    assert np.abs(found - expected).max() <= 1  # of 255: PIL rounds down


def test_the_library_and_the_published_policies() -> None:
    """Numbers and names as in policy.py of the released code."""
    assert len(LIBRARY) == 50
    assert {name for name, _ in LIBRARY} <= set(OPERATIONS)
    assert read_policies("3-1-7+43-18-18") == [
        [("translate_x", 9), ("contrast", 6), ("translate_y", 2)],
        [("translate_y", 3), ("contrast", 7), ("contrast", 7)],
    ]


def test_a_policy_applies_its_transformations_in_order_with_random_signs() -> None:
    image = photographs(64, 1).repeat(40, 1, 1, 1)
    seen = transform_images(image, read_policies("3"), torch.Generator().manual_seed(0))
    source = image[0].mul(255).round().permute(1, 2, 0).numpy()
    shift = round(150 / 331 * 64)
    sides = [torch.from_numpy(moved(source, x, 0)).permute(2, 0, 1) / 255 for x in (shift, -shift)]
    of_side = [[torch.allclose(view, side, atol=1e-6) for view in seen] for side in sides]
    assert all(a != b for a, b in zip(*of_side, strict=True))
    assert 8 < sum(of_side[0]) < 32


def test_each_image_draws_one_of_several_policies() -> None:
    image = photographs(64, 1).repeat(40, 1, 1, 1)
    model = build_model("vit_mini_64", num_classes=8, weights="random")
    defense = DEFENSES.get("ats")(ats_policy="29+30")  # invert or equalize
    seen = defense.on_input(image, model, torch.Generator().manual_seed(0), 1).images
    inverted = [bool((view - (1 - image[0])).abs().max() < 0.01) for view in seen]
    assert 8 < sum(inverted) < 32


@pytest.mark.parametrize("attack", ["patch_embedding", "token_span"])
def test_attacks_recover_the_transformed_photograph(attack: str) -> None:
    update = update_under("ats")
    found = update.attacked(attack)
    assert float(psnr(found.images, update.seen)) > 60
    assert float(psnr(found.images, update.original)) < 20
    assert found.certified


def test_it_acts_in_chains() -> None:
    """The transformed image is what MJP jigsaws."""
    chained, alone = (
        task_under(entry, "vit_mini_32") for entry in ("ats:ats_policy=0+mjp:gamma=0.5", "ats:ats_policy=0")
    )
    batch = alone.batch(0, 1, 0)
    both, one = (task.seen(batch, 0, 1, 0) for task in (chained, alone))
    assert int(both.position_mask.sum()) == 32
    assert not torch.equal(both.images, one.images)

    def patches(images: Tensor) -> list[bytes]:
        return sorted(p.numpy().tobytes() for p in torch.nn.functional.unfold(images, 4, stride=4)[0].T.contiguous())

    assert patches(both.images) == patches(one.images)


@pytest.mark.parametrize("policy", ["", "3-1-50", "3,1,7", "3--1", "flip"])
def test_policies_that_cannot_be_read(policy: str) -> None:
    with pytest.raises(UsageError, match="a policy is numbers from 0 to 49 joined by '-'"):
        DEFENSES.get("ats")(ats_policy=policy).validate()


def test_what_cannot_be_transformed() -> None:
    model = build_model("vit_mini_64", num_classes=8, weights="random")
    with pytest.raises(UsageError, match="ats transforms images of three channels, and vit_mini_64 takes 40"):
        DEFENSES.get("ats")().on_input(torch.zeros(1, 40, 1, 100), model, torch.Generator(), 1)
    seen = DEFENSES.get("ats")().on_input(photographs(64, 1), model, torch.Generator(), 1)
    with pytest.raises(UsageError, match="ats moves pixels, and label maps would not move along"):
        seen.rearrange(torch.zeros(1, 1, 64, 64))


def test_a_client_trains_on_what_it_sees() -> None:
    """The update under ATS is the undefended update on the transformed image."""
    task, plain = (task_under(entry, "vit_micro8_32") for entry in ("ats", "none"))
    weights = weights_of(task)
    seen = task.seen(task.batch(0, 1, 0), 0, 1, 0).images
    plain.batch = lambda *_: task.batch(0, 1, 0).__class__(seen, *list(vars(task.batch(0, 1, 0)).values())[1:])
    sent, expected = (t.update(0, 1, weights).tensors for t in (task, plain))
    assert all(torch.equal(sent[name], expected[name]) for name in expected)
