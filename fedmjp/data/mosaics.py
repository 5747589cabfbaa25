"""`mosaics`: images put together from pieces of the embedded photographs; the class of a pixel is its photograph.

A mosaic has four regions, the Voronoi cells of random points. Each region is cut from a crop of one of the eight
photographs of `fedmjp.data.photos`, four different ones a mosaic, at a random place, scale (`SIDES`) and reflection.
Where a region lies says nothing about its class, and each colour channel of each crop is brought to one mean and one
standard deviation, so that its average colour and contrast say nothing either: what is left is texture and shape. Each
photograph is divided into six upright strips of equal width; crops of train mosaics lie within the first, third or
fifth, those of test mosaics within the others, so that no pixel is in both. (`photos` divides each photograph once; its
right part often shows other things than its left one, and a model of mosaics would mostly be asked for those.)

Mosaics are synthetic: they show that a segmentation model learns, not how well it would do on scenes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.imageset import choose
from fedmjp.data.labelmaps import LabelMapSet
from fedmjp.data.photos import PHOTOS, Photo, photograph

REGIONS = 4
TRAIN, TEST = 1024, 256  # mosaics in a split
STRIPS = 6  # of each photograph, in turns for train and test
SIDES = (0.5, 1.0)  # of a crop, in units of a strip's width
MEAN, DEVIATION = 0.5, 0.2  # of each channel of a crop, before values are clipped to [0, 1]


@dataclass(frozen=True)
class Mosaics:
    """Makes mosaics; the same arguments and index give the same one.

    Attributes:
        test: whether pieces come from the test parts of the photographs.
        size: side of a mosaic in pixels.
        seed: of all random choices.
        numbers: number of the mosaic by index.
    """

    test: bool
    size: int
    seed: int
    numbers: tuple[int, ...]

    def image(self, index: int) -> Image.Image:
        """The mosaic at `index`, RGB."""
        return Image.fromarray(self._mosaic(index)[0])

    def labels(self, index: int) -> Image.Image:
        """Its label map, 8 bits: indices into `PHOTOS`."""
        return Image.fromarray(self._mosaic(index)[1])

    def _mosaic(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return _compose(self.test, self.size, self.seed, self.numbers[index])


@functools.lru_cache(maxsize=64)  # an image and its labels are asked for one after the other
def _compose(test: bool, size: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (size, size, 3) and labels (size, size), both uint8."""
    rng = np.random.default_rng([seed, int(test), number])
    points = rng.random((REGIONS, 2)) * size
    centres = np.stack(np.meshgrid(*(np.arange(size) + 0.5,) * 2, indexing="ij"), axis=-1)  # (size, size, 2)
    nearest = np.square(centres[..., None, :] - points).sum(axis=-1).argmin(axis=-1)  # (size, size)
    classes = rng.permutation(len(PHOTOS))[:REGIONS]
    crops = np.stack([_crop(PHOTOS[k], test, size, rng) for k in classes])  # (REGIONS, size, size, 3)
    pixels = np.take_along_axis(crops, nearest[None, ..., None], axis=0)[0]
    return pixels, classes[nearest].astype(np.uint8)


def _crop(photo: Photo, test: bool, size: int, rng: np.random.Generator) -> np.ndarray:
    """A random crop with the common mean and deviation, (size, size, 3) uint8."""
    width = photo.width // STRIPS
    side = round((SIDES[0] + (SIDES[1] - SIDES[0]) * rng.random()) * width)
    strip = 2 * int(rng.integers(STRIPS // 2)) + test
    left = strip * width + int(rng.integers(width - side + 1))
    top = int(rng.integers(photo.height - side + 1))
    box = photograph(photo.name).crop((left, top, left + side, top + side))
    pixels = np.asarray(box.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    pixels = (pixels - pixels.mean(axis=(0, 1))) / np.maximum(pixels.std(axis=(0, 1)), 1e-6) * DEVIATION + MEAN
    return np.clip(np.round(pixels * 255), 0, 255).astype(np.uint8)


def load_mosaics(request: Request) -> DataBundle:
    """1,024 train and 256 test mosaics in 8 classes, made when they are asked for.

    Raises:
        UsageError: a path is given, or scikit-image is installed without its photographs.
    """
    if request.path is not None:
        raise UsageError("data set 'mosaics' is made from scikit-image's photographs; drop --data-path")
    train = _set(False, TRAIN, request.train_limit, request)
    test = _set(True, TEST, request.test_limit, request)
    provenance = (
        f"synthetic: {len(train)} train and {len(test)} test mosaics of {REGIONS} pieces of the {len(PHOTOS)} "
        "photographs inside scikit-image"
    )
    return DataBundle(train, test, train.classes, "mosaics", provenance)


def _set(test: bool, count: int, limit: int | None, request: Request) -> LabelMapSet:
    numbers = tuple(int(i) for i in choose(count, limit, request.seed))
    source = Mosaics(test, request.size, request.seed, numbers)
    ids = [f"mosaic/{'test' if test else 'train'}/{number}" for number in numbers]
    return LabelMapSet(source.image, source.labels, ids, [photo.name for photo in PHOTOS], request.size)
