"""Decoding compared with torchvision's transforms and with known pixel values."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as peer

from attacks.registry import UsageError
from fedmjp.data import ImageSet, imageset
from fedmjp.data.imageset import choose, to_square_rgb


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


class Pictures:
    def __init__(self, pictures):
        self.pictures = pictures

    def __call__(self, index):
        if self.pictures[index] is None:
            raise OSError("image file is truncated")
        return self.pictures[index]


def make_set(*pictures, size=8):
    ids = [f"id{k}" for k in range(len(pictures))]
    return ImageSet(Pictures(pictures), [0] * len(pictures), ids, ["only"], size)


def test_kept_images_are_decoded_once(monkeypatch):
    pictures = [noise(9, 9), noise(8, 12)]
    kept, asked = make_set(*pictures), make_set(*pictures)
    assert kept.keep().shape == (2, 8, 8, 3)
    kept._open.pictures = [None, None]  # what is decoded again from here on fails
    assert torch.equal(kept.images([1, 0]), asked.images([1, 0]))
    assert kept.contents([0, 1]) == asked.contents([0, 1])
    with pytest.raises(UsageError, match="cannot decode image 'id0'"):
        kept.subset([0]).images([0])  # a set of its own
    monkeypatch.setattr(imageset, "KEPT_BYTES", 2 * 3 * 8**2 - 1)
    assert asked.keep() is None
    assert asked.images([0]).shape == (1, 3, 8, 8)


@pytest.mark.parametrize(("width", "height"), [(50, 50), (97, 64), (64, 97), (33, 20), (7, 300), (1, 1), (32, 45)])
def test_resize_and_crop_equal_torchvision(width, height):
    picture = noise(width, height)
    resized = peer.resize(picture, 32, peer.InterpolationMode.BICUBIC, antialias=True)
    expected = peer.center_crop(resized, [32, 32])
    assert np.array_equal(np.asarray(to_square_rgb(picture, 32)), np.asarray(expected))


def test_image_of_the_right_size_is_unchanged():
    picture = noise(32, 32)
    pixels = make_set(picture, size=32).images([0])  # (1, 3, 32, 32)
    assert pixels.dtype == torch.float32
    assert np.array_equal((pixels[0] * 255).permute(1, 2, 0).numpy(), np.asarray(picture).astype(np.float32))


@pytest.mark.parametrize(
    ("picture", "rgb"),
    [
        (Image.new("L", (9, 9), 51), (51, 51, 51)),
        (Image.new("1", (9, 9), 1), (255, 255, 255)),
        (Image.new("RGBA", (9, 9), (10, 20, 30, 40)), (10, 20, 30)),
        (Image.new("LA", (9, 9), (7, 0)), (7, 7, 7)),
        (Image.new("CMYK", (9, 9), (255, 0, 0, 0)), (0, 255, 255)),
        (Image.new("RGB", (9, 9), (200, 0, 100)).convert("P", palette=Image.Palette.ADAPTIVE), (200, 0, 100)),
        (Image.fromarray(np.full((9, 9), 257 * 100, dtype=np.uint16)), (100, 100, 100)),
        (Image.new("RGB", (1, 1), (1, 2, 3)), (1, 2, 3)),
    ],
    ids=["grey", "bilevel", "rgba", "grey-alpha", "cmyk", "palette", "grey16", "one-pixel"],
)
def test_every_mode_becomes_rgb(picture, rgb):
    pixels = make_set(picture).images([0])
    assert pixels.shape == (1, 3, 8, 8)
    expected = torch.tensor(rgb, dtype=torch.float32).div(255).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    assert torch.equal(pixels, expected)


def test_order_subset_of_subset_and_pickle():
    colours = [Image.new("RGB", (8, 8), (k, 0, 0)) for k in range(6)]
    images = ImageSet(Pictures(colours), [0, 1, 0, 1, 0, 1], list("abcdef"), ["even", "odd"], 8)
    part = images.subset(torch.tensor([5, 1, 4])).subset([2, 0])
    assert (part.ids, part.labels.tolist(), part.classes) == (["e", "f"], [0, 1], ["even", "odd"])
    for copy in (part, pickle.loads(pickle.dumps(part))):
        assert torch.equal((copy.images(np.array([1, 0]))[:, 0, 0, 0] * 255).round(), torch.tensor([5.0, 4.0]))
    assert part.images([]).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("index", [-1, 2])
def test_index_outside_the_set(index):
    images = make_set(noise(8, 8), noise(8, 8))
    with pytest.raises(IndexError, match="from 0 to 1"):
        images.images([index])
    with pytest.raises(IndexError, match="from 0 to 1"):
        images.subset([index])


def test_damage_found_on_decoding_names_the_image():
    with pytest.raises(UsageError, match=r"'id1' \(image file is truncated\); remove or replace it"):
        make_set(noise(8, 8), None).images([0, 1])


@pytest.mark.parametrize(
    ("labels", "advice"), [([0], "one label per image"), ([0, 3], "count from 0"), ([-1, 0], "-1..0")]
)
def test_labels_that_do_not_fit(labels, advice):
    with pytest.raises(UsageError, match=advice):
        ImageSet(Pictures([]), labels, ["a", "b"], ["x", "y"], 8)


def test_choose():
    assert choose(5, None, 0).tolist() == choose(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    picked = choose(1000, 50, 3)
    assert len(set(picked)) == 50
    assert (np.diff(picked) > 0).all()
    assert picked.tolist() == choose(1000, 50, 3).tolist() != choose(1000, 50, 4).tolist()
