"""`photos`: crops of the colour photographs included in scikit-image, a data set that needs no download.

Each photograph is a class. A vertical border divides every photograph in two: train crops come from the left part, test
crops from the right part, so no pixel is in both. Every crop is a square at native resolution, resized on demand. Crop
0 of a class is its best view. Images are ordered by crop number, then class, so the first eight show eight classes.

The photographs are the public-domain and CC0 images of `skimage.data`, whose docstrings name authors and origins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.imageset import ImageSet, choose, to_square_rgb

TRAIN_CROPS = 12
TEST_CROPS = 5
# Fractions of the region's shorter side. Test regions are narrow; smaller crops of them would be blurred at 224 pixels.
TRAIN_SIDES = (0.62, 1.0)
TEST_SIDES = (0.75, 1.0)


class Photo(NamedTuple):
    """A photograph of `skimage.data`; all lengths are in pixels.

    Attributes:
        name: of the function in `skimage.data`.
        width, height: of the photograph.
        border: first column of the test part.
        best_train, best_test: the best views, (left, top, side).
    """

    name: str
    width: int
    height: int
    border: int
    best_train: tuple[int, int, int]
    best_test: tuple[int, int, int]


class Crop(NamedTuple):
    """A square crop of a photograph.

    Attributes:
        photo: name of the photograph.
        number: of the crop in its class, from 0.
        box: (left, top, right, bottom) in pixels of the photograph, right and bottom exclusive.
    """

    photo: str
    number: int
    box: tuple[int, int, int, int]


PHOTOS = (
    Photo("astronaut", 512, 512, 348, (100, 2, 224), (348, 20, 164)),
    Photo("chelsea", 451, 300, 289, (19, 20, 270), (289, 50, 162)),
    Photo("coffee", 600, 400, 432, (132, 0, 300), (432, 150, 168)),
    Photo("rocket", 640, 427, 461, (180, 137, 280), (461, 240, 179)),
    Photo("retina", 1411, 1411, 931, (60, 300, 800), (931, 470, 480)),
    Photo("hubble_deep_field", 1000, 872, 660, (250, 60, 400), (660, 380, 340)),
    Photo("immunohistochemistry", 512, 512, 340, (96, 0, 240), (340, 150, 172)),
    Photo("stereo_motorcycle", 741, 500, 489, (205, 130, 284), (489, 170, 252)),
)


@dataclass(frozen=True)
class CropImages:
    """Opens crops of the photographs.

    Attributes:
        crops: the crops.
        size: side in pixels of what is returned; 0 for native resolution.
    """

    crops: list[Crop]
    size: int = 0

    def __call__(self, index: int) -> Image.Image:
        """The image of crop number `index`.

        Raises:
            UsageError: scikit-image is installed without the photograph.
        """
        crop = self.crops[index]
        return _resized(crop.photo, crop.box, self.size) if self.size else photograph(crop.photo).crop(crop.box)


def load_photos(request: Request) -> DataBundle:
    """Load the embedded photographs: 96 train and 40 test crops in 8 classes.

    Raises:
        UsageError: a path is given, or scikit-image is installed without its photographs.
    """
    return _bundle("photos", request, lambda count, limit: choose(count, limit, request.seed))


def load_photos_in_order(request: Request) -> DataBundle:
    """Load the same crops, of which a limit takes the first ones: one view of each class, the best views first.

    Raises:
        UsageError: see `load_photos`.
    """
    return _bundle("photos-in-order", request, lambda count, limit: range(count)[:limit])


def photo_crops(split: str) -> list[Crop]:
    """Return the crops of `split` ("train" or "test") in the order of the image set."""
    train = split == "train"
    return [
        Crop(photo.name, number, _box(photo, number, train))
        for number in range(TRAIN_CROPS if train else TEST_CROPS)
        for photo in PHOTOS
    ]


def _box(photo: Photo, number: int, train: bool) -> tuple[int, int, int, int]:
    left, right = (0, photo.border) if train else (photo.border, photo.width)
    if number == 0:
        x, y, side = photo.best_train if train else photo.best_test
    else:
        smallest, largest = TRAIN_SIDES if train else TEST_SIDES
        # The R3 sequence (powers of the root of x^4 = x + 1) spreads few crops evenly over side, x and y.
        u, v, w = (number * step % 1 for step in (0.8191725, 0.6710436, 0.5497005))
        side = round((smallest + (largest - smallest) * u) * min(right - left, photo.height))
        x, y = left + round(v * (right - left - side)), round(w * (photo.height - side))
    return x, y, x + side, y + side


@functools.lru_cache(maxsize=len(PHOTOS))
def photograph(name: str) -> Image.Image:
    """The whole photograph called `name` in `PHOTOS`, RGB.

    Raises:
        UsageError: scikit-image is installed without it.
    """
    import skimage.data

    try:
        pixels = getattr(skimage.data, name)()
    except (OSError, ImportError) as error:
        raise UsageError(f"scikit-image lacks its photograph {name!r}; reinstall it from its wheel") from error
    return Image.fromarray(pixels[0] if name == "stereo_motorcycle" else pixels)


@functools.lru_cache(maxsize=len(PHOTOS) * (TRAIN_CROPS + TEST_CROPS))
def _resized(name: str, box: tuple[int, int, int, int], size: int) -> Image.Image:
    """A crop at one size, kept: a run reads the same few again and again."""
    return to_square_rgb(photograph(name).crop(box), size)


def _bundle(name: str, request: Request, kept: Callable[[int, int | None], Sequence[int]]) -> DataBundle:
    if request.path is not None:
        raise UsageError(f"data set {name!r} is part of scikit-image; drop --data-path, or use folder:PATH instead")
    limits = {"train": request.train_limit, "test": request.test_limit}
    train, test = (_image_set(split, kept, limit, request.size) for split, limit in limits.items())
    provenance = f"{len(train)} train and {len(test)} test crops of the photographs inside scikit-image"
    return DataBundle(train, test, train.classes, name, provenance)


def _image_set(split: str, kept: Callable[[int, int | None], Sequence[int]], limit: int | None, size: int) -> ImageSet:
    every = photo_crops(split)
    crops = [every[i] for i in kept(len(every), limit)]
    names = [photo.name for photo in PHOTOS]
    labels = [names.index(crop.photo) for crop in crops]
    return ImageSet(CropImages(crops, size), labels, [crop_id(crop, split) for crop in crops], names, size)


def crop_id(crop: Crop, split: str) -> str:
    """The id of a crop in tables, "PHOTO/SPLIT/NUMBER"."""
    return f"{crop.photo}/{split}/{crop.number}"
