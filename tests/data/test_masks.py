"""Folders of images with label maps: layout, ignored pixels, geometry, mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data import load_data
from fedmjp.data.catalog import LABEL_MAPS
from fedmjp.data.labelmaps import IGNORED

NAMES = ("wall", "building", "sky")


def plant(root, *, size=(12, 8), values=(0, 1, 2, 3), parts=("training", "validation"), mode="L"):
    """Two images a part: upright stripes of `values`; the red channel of the image is 60 times the value."""
    stripes = np.repeat(np.array(values, dtype=np.uint8), size[0] // len(values))[None].repeat(size[1], axis=0)
    for part in parts:
        for kind in ("images", "annotations"):
            (root / kind / part).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            picture = np.stack([stripes * 60, stripes * 0, stripes * 0], axis=-1).astype(np.uint8)
            Image.fromarray(picture).save(root / "images" / part / f"{number}.bmp")
            labels = Image.fromarray(stripes)
            labels = labels.convert(mode) if mode != "P" else labels
            if mode == "P":
                labels.putpalette(bytes(range(256)) * 3)
            labels.save(root / "annotations" / part / f"{number}.png")
    lines = [f"{k}\t0.1\t10\t2\t1\t{name}" for k, name in enumerate(NAMES, start=1)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *lines]) + "\n")
    return root


def load(root, size=8, **more):
    return load_data(f"masks:{root}", size=size, **more)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_classes_count_from_one_in_files_and_from_zero_here(tmp_path, mode) -> None:
    bundle = load(plant(tmp_path, mode=mode))
    assert bundle.classes == list(NAMES)
    assert (len(bundle.train), len(bundle.test)) == (2, 2)
    images, labels = bundle.train.images([0, 1]), bundle.train.targets([0, 1])
    assert labels.shape == (2, 8, 8)
    # The 12 x 8 picture is cut to its middle: 1 column of value 0, 3 of 1, 3 of 2, 1 of 3.
    row = [IGNORED, 0, 0, 0, 1, 1, 1, 2]
    assert labels[0, 3].tolist() == row
    assert (images[0, 0, 3] * 255 / 60).round().tolist() == [0 if v == IGNORED else v + 1 for v in row]


def test_labels_follow_their_images_when_both_are_resized(tmp_path) -> None:
    bundle = load(plant(tmp_path, size=(96, 64)), size=16)
    images, labels = bundle.test.images([1]), bundle.test.targets([1])
    value = torch.where(labels == IGNORED, 0, labels + 1)
    agrees = (images[:, 0] * 255 / 60).round() == value
    assert agrees.float().mean() > 0.85  # bicubic pixels on a border belong to neither side


def test_a_subset_keeps_images_and_labels_together(tmp_path) -> None:
    bundle = load(plant(tmp_path))
    part = bundle.train.subset([1])
    assert part.ids == ["images/training/1.bmp"]
    assert part.kind == LABEL_MAPS
    assert torch.equal(part.targets([0]), bundle.train.targets([1]))


def spoil_size(root):
    Image.new("L", (5, 5)).save(root / "annotations/training/1.png")


def spoil_mode(root):
    Image.new("I;16", (12, 8)).save(root / "annotations/training/1.png")


def spoil_format(root):
    Image.new("L", (12, 8)).save(root / "annotations/training/1.png", format="EPS")  # which runs a program to be read


def spoil_class(root):
    Image.new("L", (12, 8), 4).save(root / "annotations/training/1.png")


def remove(name):
    def act(root):
        for path in sorted(root.glob(name)):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                file.unlink()
            if path.is_dir():
                path.rmdir()

    return act


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("annotations/training"), "no folder .*annotations/training; lay the files out as images/"),
        (remove("images/validation"), "no folder .*images/validation; lay"),
        (remove("images/training/*"), "no image found in .*images/training"),
        (
            remove("annotations/training/0.png"),
            "1 of 2 images in training have no label map; the first is annotations/",
        ),
        (remove("objectInfo150.txt"), "holds no objectInfo150.txt"),
        (lambda root: (root / "objectInfo150.txt").write_text("Name\n"), "names 0 classes"),
        (spoil_size, "is 5 x 5 pixels, its image 12 x 8; they must be alike"),
        (spoil_mode, "has mode I;16; save it as 8-bit"),
        (spoil_format, "annotations/training/1.png"),
        (spoil_class, "annotations/training/1.png holds class 4, but the list of classes ends at 3"),
    ],
)
def test_mistakes_are_one_line(tmp_path, spoil, words) -> None:
    spoil(plant(tmp_path))
    with pytest.raises(UsageError, match=words) as raised:
        load(tmp_path).train.targets([0, 1])
    assert "\n" not in str(raised.value)


def test_no_folder_is_one_line(tmp_path) -> None:
    with pytest.raises(UsageError, match="no folder at .*; give a folder that holds images/"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no folder given; write masks:PATH"):
        load_data("masks:", size=8)
