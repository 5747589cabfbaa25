"""The embedded photographs: sizes, order, and disjoint train and test regions."""

from collections import Counter

import numpy as np
import pytest
import skimage.data
import torch

from attacks import UsageError
from fedmjp.data import load_data
from fedmjp.data.photos import PHOTOS, photo_crops


def original(name):
    pixels = getattr(skimage.data, name)()
    return pixels[0] if name == "stereo_motorcycle" else pixels


@pytest.mark.parametrize("size", [32, 64, 224, 288])
def test_sizes_range_and_determinism(size):
    bundle, again = load_data("photos", size=size), load_data("photos", size=size)
    for images, twin in ((bundle.train, again.train), (bundle.test, again.test)):
        pixels = images.images(range(0, len(images), 7))
        assert pixels.shape[1:] == (3, size, size)
        assert pixels.min() >= 0
        assert pixels.max() <= 1
        assert pixels.flatten(1).std(dim=1).min() > 0.03, "a crop is nearly one colour"
        assert torch.equal(pixels, twin.images(range(0, len(images), 7)))


def test_counts_labels_ids_and_interleaving():
    bundle = load_data("photos", size=32)
    assert (len(bundle.train), len(bundle.test), len(bundle.classes)) == (96, 40, 8)
    assert bundle.train.labels[:8].tolist() == bundle.test.labels[:8].tolist() == list(range(8))
    assert set(Counter(bundle.train.labels.tolist()).values()) == {12}
    for split, images in (("train", bundle.train), ("test", bundle.test)):
        assert len(set(images.ids)) == len(images)
        for label, name in zip(images.labels.tolist(), images.ids, strict=True):
            assert name.startswith(f"{bundle.classes[label]}/{split}/")
    assert bundle.train.ids[24] == "astronaut/train/3"


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: photo.name)
def test_train_and_test_share_no_pixel(photo):
    masks = {}
    for split in ("train", "test"):
        masks[split] = np.zeros(original(photo.name).shape[:2], dtype=bool)
        crops = [crop for crop in photo_crops(split) if crop.photo == photo.name]
        assert len({crop.box for crop in crops}) == len(crops)
        for crop in crops:
            left, top, right, bottom = crop.box
            assert right - left == bottom - top
            assert left >= 0
            assert top >= 0
            assert right <= masks[split].shape[1]
            assert bottom <= masks[split].shape[0]
            masks[split][top:bottom, left:right] = True
    assert masks["train"].mean() > 0.25
    assert masks["test"].mean() > 0.10
    assert not (masks["train"] & masks["test"]).any()


def test_crop_at_native_size_is_the_photograph_itself():
    face = next(crop for crop in photo_crops("train") if crop.photo == "astronaut")
    left, top, right, bottom = face.box
    assert right - left == 224
    pixels = load_data("photos", size=224).train.images([0])[0]
    native = original("astronaut")[top:bottom, left:right].astype(np.float32) / 255
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), native)


def test_limits_take_a_seeded_subset():
    full = load_data("photos", size=32)
    some = load_data("photos", size=32, train_limit=10, test_limit=3, seed=1)
    assert (len(some.train), len(some.test)) == (10, 3)
    where = [full.train.ids.index(name) for name in some.train.ids]
    assert where == sorted(where)
    assert torch.equal(some.train.images([4]), full.train.images([where[4]]))
    assert some.train.ids == load_data("photos", size=32, train_limit=10, seed=1).train.ids
    assert some.train.ids != load_data("photos", size=32, train_limit=10, seed=2).train.ids


def test_in_order_limits_take_the_first_views():
    whole, some = load_data("photos", size=32), load_data("photos-in-order", size=32, train_limit=10, test_limit=3)
    assert some.train.ids == whole.train.ids[:10]
    assert some.test.ids == whole.test.ids[:3]
    assert torch.equal(some.train.images([9]), whole.train.images([9]))
    with pytest.raises(UsageError, match="data set 'photos-in-order' is part of scikit-image"):
        load_data("photos-in-order", size=32, path="x")
