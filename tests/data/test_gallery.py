"""Galleries of images to attack, from every kind of source."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from attacks import UsageError
from fedmjp.data import load_gallery


def save(path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((40, 40, 3), value, dtype=np.uint8)).save(path)


def test_photos_start_with_one_view_of_each_photograph() -> None:
    gallery = load_gallery("photos", size=32, limit=8)
    assert len({name.split("/")[0] for name in gallery.images.ids}) == 8
    assert gallery.images.images([0]).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("layout", [("a.png", "b.png", "c.png"), ("x/a.png", "x/b.png", "y/deep/c.png")])
def test_a_folder_flat_or_nested_gives_every_picture(tmp_path, layout) -> None:
    for value, name in enumerate(layout):
        save(tmp_path / "here" / name, 10 * value)
    gallery = load_gallery(str(tmp_path / "here"), size=16)
    assert gallery.images.ids == list(layout)
    assert gallery.name == "folder:here"
    assert [round(float(i.mean()) * 255) for i in gallery.images.images([0, 1, 2])] == [0, 10, 20]
    assert len(gallery.images.classes) == len({name.rpartition("/")[0] for name in layout})


def test_a_limit_is_a_choice_determined_by_the_seed(tmp_path) -> None:
    for value in range(20):
        save(tmp_path / f"{value:02d}.png", value)
    names = [load_gallery(str(tmp_path), size=16, limit=5, seed=seed).images.ids for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 5


def test_hidden_files_and_other_file_types_are_ignored(tmp_path) -> None:
    save(tmp_path / "a.png", 1)
    save(tmp_path / ".cache" / "b.png", 1)
    (tmp_path / "notes.txt").write_text("x")
    assert load_gallery(str(tmp_path), size=16).images.ids == ["a.png"]


@pytest.mark.parametrize(
    ("place", "words"), [("no/such/place", "neither a folder nor a data set"), ("", "no image found")]
)
def test_a_place_without_images_raises(tmp_path, place: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_gallery(place or str(tmp_path), size=16)


def test_an_elongated_image_is_refused_before_it_is_resized(tmp_path) -> None:
    Image.fromarray(np.zeros((1, 60_000, 3), dtype=np.uint8)).save(tmp_path / "strip.png")
    gallery = load_gallery(str(tmp_path), size=224)
    with pytest.raises(UsageError, match="too long a strip"):
        gallery.images.images([0])
