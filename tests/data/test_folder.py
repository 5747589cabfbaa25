"""Image folders: layouts, splits, broken files."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data import load_data
from fedmjp.data.folder import split_files


def plant(root, *names, mode="RGB"):
    for k, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (12, 10), 10 * k if mode == "L" else (10 * k,) * len(mode)).save(root / name)


def test_broken_images_are_skipped_named_and_counted(tmp_path):
    plant(tmp_path, *(f"cat/{k}.png" for k in range(5)), *(f"dog/{k}.jpg" for k in range(5)))
    (tmp_path / "cat/empty.png").write_bytes(b"")
    (tmp_path / "dog/text.jpg").write_text("no image")
    whole = (tmp_path / "cat/0.png").read_bytes()
    (tmp_path / "cat/torn.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat/notes.txt").write_text("no image file, so no skipped image")
    bundle = load_data(f"folder:{tmp_path}", size=8)
    assert [line.split(":")[0] for line in bundle.skipped] == ["cat/empty.png", "cat/torn.png", "dog/text.jpg"]
    assert len(bundle.train) + len(bundle.test) == 10
    assert (len(bundle.test), bundle.classes) == (2, ["cat", "dog"])
    assert not set(bundle.train.ids) & set(bundle.test.ids)
    assert bundle.train.images(range(8)).shape == (8, 3, 8, 8)
    assert str(tmp_path) not in bundle.provenance + "".join(bundle.skipped)


@pytest.mark.parametrize(
    ("mode", "name", "rgb"),
    [
        ("L", "grey.png", (10, 10, 10)),
        ("RGBA", "alpha.png", (10, 10, 10)),
        # C = M = Y = K = 10 gives the RGB value (255 - 10) * (255 - 10) / 255 = 235.4.
        ("CMYK", "print.tif", (235, 235, 235)),
        ("RGB", "plain.bmp", (10, 10, 10)),
    ],
)
def test_modes_from_files(tmp_path, mode, name, rgb):
    plant(tmp_path, f"a/0{name}", f"a/1{name}", mode=mode)
    bundle = load_data(f"folder:{tmp_path}", size=4)
    both = [images.images([0])[0, :, 0, 0] for images in (bundle.train, bundle.test)]
    ids = [*bundle.train.ids, *bundle.test.ids]
    expected = torch.tensor(rgb) / 255
    assert torch.allclose(both[ids.index(f"a/1{name}")], expected, atol=1.1 / 255)


@pytest.mark.parametrize("held_out", ["val", "valid", "validation", "test"])
def test_train_and_test_subfolders_are_used(tmp_path, held_out):
    plant(tmp_path, "train/b/0.png", "train/a/0.png", "train/a/1.png", f"{held_out}/b/9.png", f"{held_out}/c/8.png")
    bundle = load_data(f"folder:{tmp_path}", size=8)
    assert bundle.classes == ["a", "b", "c"]
    assert bundle.train.ids == ["train/a/0.png", "train/a/1.png", "train/b/0.png"]
    assert (bundle.test.ids, bundle.test.labels.tolist()) == ([f"{held_out}/b/9.png", f"{held_out}/c/8.png"], [1, 2])
    assert held_out in bundle.provenance


def test_limit_with_subfolders_skips_broken_files(tmp_path):
    plant(tmp_path, *(f"train/a/{k:02}.png" for k in range(20)), "val/a/0.png")
    clean = load_data(f"folder:{tmp_path}", size=8, train_limit=10, seed=5)
    broken = clean.train.ids[3]
    (tmp_path / broken).write_bytes(b"")
    bundle = load_data(f"folder:{tmp_path}", size=8, train_limit=10, seed=5)
    assert bundle.skipped[0].startswith(broken)
    assert len(bundle.train) == 10
    assert len(set(bundle.train.ids) & set(clean.train.ids)) == 9
    assert bundle.train.ids == sorted(bundle.train.ids)


def test_split_is_seeded_and_keeps_every_class_in_both():
    files = sorted(f"{c}/{k:03}.png" for c, n in (("a", 100), ("b", 2), ("c", 1), ("d", 10)) for k in range(n))
    train, test = split_files(files, 0)
    assert sorted(train + test) == files
    held = {c: sum(f.startswith(c) for f in test) for c in "abcd"}
    assert held == {"a": 20, "b": 1, "c": 0, "d": 2}
    assert split_files(files, 0) == (train, test) != split_files(files, 1)


def test_split_of_single_image_classes():
    files = [f"{k:03}/x.png" for k in range(50)]
    train, test = split_files(files, 0)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(train + test) == files


def test_shared_imagenet_sample_as_folder_and_as_imagenet(shared):
    root = shared("imagenet-sample")
    bundle = load_data(f"folder:{root}", size=224, train_limit=6)
    assert (len(bundle.classes), len(bundle.train), len(bundle.test), bundle.skipped) == (800, 6, 160, [])
    named = load_data("imagenet", size=224, path=root, train_limit=6)
    assert (named.name, named.train.ids) == ("imagenet", bundle.train.ids)
    pixels = bundle.train.images(range(6))
    assert torch.equal(pixels, named.train.images(range(6)))
    with Image.open(root / bundle.train.ids[2]) as picture:
        centre = np.asarray(picture.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC))
    assert np.array_equal((pixels[2] * 255).round().permute(1, 2, 0).numpy(), centre)
    label = int(bundle.train.labels[2])
    assert bundle.train.ids[2].startswith(bundle.classes[label] + "/")


def test_an_image_deleted_after_loading_is_named(tmp_path):
    plant(tmp_path / "set", "a/0.png", "a/1.png")
    bundle = load_data(f"folder:{tmp_path / 'set'}", size=8)
    shutil.rmtree(tmp_path / "set")
    with pytest.raises(UsageError, match=bundle.train.ids[0]):
        bundle.train.images([0])
