"""Undoing ATS' policies: each inverse against the original pixels, and photographs from one update and from several."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from attacks import ATTACKS, Observation, UsageError
from attacks.inverse_transformations import undo_policies
from attacks.policies import PUBLISHED, read_policies
from attacks.transformations import OPERATIONS, transform_images
from fedmjp import simulate
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel
from tests.attacks.contract import small
from tests.conftest import observe, photographs

# Transformation, level, sign -> largest mean error of known pixels in 8-bit levels: rounding, interpolation.
INVERSES = [
    ("invert", 7, 1, 0.0),
    ("brightness", 5, -1, 0.8),
    ("contrast", 6, -1, 0.6),
    ("color", 8, -1, 0.8),
    ("sharpness", 5, -1, 0.8),
    ("sharpness", 3, 1, 0.6),
    ("translate_x", 9, -1, 0.0),
    ("translate_y", 2, 1, 0.0),
    ("rotate", 2, 1, 0.0),
    ("shear_y", 2, -1, 5.0),
]


def eight_bits(images: Tensor) -> np.ndarray:
    return images[0].mul(255).round().byte().permute(1, 2, 0).numpy()


@pytest.fixture(scope="module")
def model() -> BuiltModel:
    return small()


@pytest.fixture(scope="module")
def image() -> Tensor:
    return photographs(64, 1)


def fed(model: BuiltModel, image: Tensor, seed: int) -> Observation:
    """The update of a client whose signs and policy `seed` draws."""
    policies = read_policies(PUBLISHED)
    return observe(model, transform_images(image, policies, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("name", "level", "sign", "error"), INVERSES)
def test_each_inverse_gives_back_the_pixels(name: str, level: int, sign: int, error: float, image: Tensor) -> None:
    """Under the sign that was applied, which is as consistent as the other one or more."""
    original = eight_bits(image)
    seen = np.asarray(OPERATIONS[name](Image.fromarray(original), level, sign))
    found = undo_policies(seen, [[(name, level)]])
    assert len(found) == 2 if OPERATIONS[name].signed else 1
    gaps = [np.abs(one.pixels - original)[one.exact].mean() for one in found]
    right = found[int(np.argmin(gaps))]
    assert min(gaps) <= error
    assert right.exact.mean() > 0.5
    assert right.residual < found[0].residual + 1 / 255


def test_what_left_the_frame_is_not_known(image: Tensor) -> None:
    """A shift by 29 of 64 columns, written out: what stood in the first ones is gone, and stands at the mean."""
    original = eight_bits(image)
    seen = np.zeros_like(original)
    seen[:, :35] = original[:, 29:]
    found = undo_policies(seen, [[("translate_x", 9)]])[0]
    assert found.exact[:, 29:].all()
    assert not found.seen[:, :29].any()
    assert np.array_equal(found.pixels[:, 29:], original[:, 29:])
    assert np.allclose(found.pixels[:, :29], original[:, 29:].reshape(-1, 3).mean(axis=0))


def test_one_update_gives_what_is_in_it(model: BuiltModel, image: Tensor) -> None:
    update = fed(model, image, 0)
    found, transformed = (ATTACKS.get(name)()([update]) for name in ("undo_policy", "patch_embedding"))
    kept = found.known[0, 0]
    assert 0.3 < float(kept.float().mean()) < 0.9
    assert "of the pixels out of the frame" in found.diagnosis
    assert float((found.images - image)[..., kept].square().mean()) < 10**-3.5
    assert float(psnr(found.images, image)) > float(psnr(transformed.images, image)) + 4


def test_several_updates_give_the_photograph(model: BuiltModel, image: Tensor) -> None:
    """Each round's shifts show another part; the update of another image is left out."""
    history = [fed(model, images, seed) for seed, images in enumerate([image] * 4 + [photographs(64, 2)[1:], image])]
    found = ATTACKS.get("undo_policy")(joins=True)(history)
    assert found.details["joined"] == 5
    assert float(psnr(found.images, image)) > 30
    assert found.details["seen"] == 1
    assert float(found.known.float().mean()) > 0.9
    alone = ATTACKS.get("undo_policy")()(history)
    assert alone.details["joined"] == 1


def test_images_that_no_policy_made(model: BuiltModel, image: Tensor) -> None:
    """An undefended update is left to other attacks, before and when it is attacked."""
    attack = ATTACKS.get("undo_policy")()
    plain = [observe(model, image)]
    assert "is not one that policy 3-1-7+43-18-18 makes" in attack.obstacle(plain)
    assert attack(plain).images is None
    assert attack.obstacle([fed(model, image, 0)]) == ""
    with pytest.raises(UsageError, match="at most 255 pixels a side"):
        undo_policies(np.zeros((256, 256, 3), dtype=np.uint8), read_policies("0"))


def test_the_defence_names_it() -> None:
    assert "undo_policy" in DEFENSES.get("ats")().known_by


def test_a_federation_keeps_earlier_updates_for_it(tmp_path) -> None:
    """It works on one update, too, and is given several where they are granted."""
    shared = ("--model", "vit_mini_32", "--clients", "2", "--train-limit", "2", "--test-limit", "2", "--rounds", "3")
    run = ("--defense", "ats", "--attacks", "undo_policy", "--audit-rounds", "3", "--audit-clients", "0")
    assert simulate.main([*shared, *run, "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    (own,) = (row for row in rows if row["attack"] == "undo_policy")
    assert own["details"]["joined"] > 1
