"""Mosaics: their labels name the photograph of each pixel, and no pixel is in both splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data import load_data, load_gallery, mosaics
from fedmjp.data.photos import PHOTOS


@pytest.fixture(autouse=True)
def fresh():
    mosaics._compose.cache_clear()
    yield
    mosaics._compose.cache_clear()


def test_mosaics_are_determined_by_seed_split_and_number() -> None:
    one, again, other = (load_data("mosaics", size=16, seed=s, train_limit=4, test_limit=3) for s in (1, 1, 2))
    assert (len(one.train), len(one.test)) == (4, 3)
    assert torch.equal(one.train.images(range(4)), again.train.images(range(4)))
    assert torch.equal(one.train.targets(range(4)), again.train.targets(range(4)))
    assert not torch.equal(one.train.images(range(3)), other.train.images(range(3)))
    assert not torch.equal(one.train.images(range(3)), one.test.images(range(3)))


def test_the_label_is_the_photograph(monkeypatch) -> None:
    monkeypatch.setattr(
        mosaics, "_crop", lambda photo, test, size, rng: np.full((size, size, 3), PHOTOS.index(photo), np.uint8)
    )
    bundle = load_data("mosaics", size=24, train_limit=8)
    images, labels = bundle.train.images(range(8)), bundle.train.targets(range(8))
    assert torch.equal((images[:, 0] * 255).round().long(), labels)
    assert all(len(labels[k].unique()) <= mosaics.REGIONS for k in range(8))


@pytest.mark.parametrize("test", [False, True])
def test_crops_keep_to_the_strips_of_their_split(monkeypatch, test) -> None:
    seen = []

    class Noted:
        def __init__(self, photo):
            self.photo = photo

        def crop(self, box):
            seen.append((self.photo, box))
            return Image.effect_noise((box[2] - box[0], box[3] - box[1]), 40).convert("RGB")

    monkeypatch.setattr(mosaics, "photograph", lambda name: Noted(next(p for p in PHOTOS if p.name == name)))
    rng = np.random.default_rng(0)
    for photo in PHOTOS:
        for _ in range(40):
            mosaics._crop(photo, test, 8, rng)
    strips = {
        (int(left) // (p.width // mosaics.STRIPS), (right - 1) // (p.width // mosaics.STRIPS))
        for p, (left, _, right, _) in seen
    }
    assert strips == {(k, k) for k in range(int(test), mosaics.STRIPS, 2)}
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= p.width and box[3] <= p.height for p, box in seen)


def test_average_colour_and_contrast_say_nothing() -> None:
    crop = mosaics._crop(PHOTOS[0], False, 32, np.random.default_rng(3)) / 255
    assert crop.mean(axis=(0, 1)) == pytest.approx(mosaics.MEAN, abs=0.02)
    assert crop.std(axis=(0, 1)) == pytest.approx(mosaics.DEVIATION, abs=0.03)


def test_mosaics_are_not_attacked_as_images() -> None:
    with pytest.raises(UsageError, match="an attack needs images with a class each"):
        load_gallery("mosaics", size=32)
    with pytest.raises(UsageError, match="drop --data-path"):
        load_data("mosaics", size=32, path="anywhere")
