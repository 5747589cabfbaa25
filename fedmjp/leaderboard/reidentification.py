"""The candidates among which a submission's originals are looked for (`fedmjp.metrics.reidentification`).

They are the original and 999 random crops of the embedded photographs, the same ones for every submission. A crop that
shares more than half of the area that it and the original show together is left out as the same picture.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedmjp.data.imageset import ImageSet
from fedmjp.data.photos import PHOTOS, Crop, CropImages, crop_id, photo_crops
from fedmjp.metrics import load_lpips
from fedmjp.metrics.reidentification import Lineup

SPARE = 1.25  # drawn, for one that is needed
SMALLEST_SIDE = 0.3  # of a crop, as a share of the photograph's shorter side
SAME = 0.5  # share of the union of two crops' areas that both show, above which they are one picture
SEED = 20  # of the crops


@lru_cache(maxsize=2)
def lineup_of(size: int, candidates: int) -> Lineup | None:
    """The lineup of images of a size, embedded once in a process; None where LPIPS has no weights here.

    Args:
        size: side of the images in pixels.
        candidates: images in the lineup, the original among them.
    """
    lpips = load_lpips()
    if lpips is None:
        return None
    crops = random_crops(int(SPARE * candidates))
    names = [photo.name for photo in PHOTOS]
    labels = [names.index(crop.photo) for crop in crops]
    pool = ImageSet(CropImages(list(crops)), labels, [str(c.number) for c in crops], names, size)
    return Lineup(pool.images(range(len(pool))), lpips, lambda image_id: crops_beside(image_id, crops, candidates))


def crops_beside(image_id: str, crops: tuple[Crop, ...], candidates: int) -> list[int]:
    """Indices of the `candidates` - 1 crops that stand beside an original.

    Raises:
        ValueError: too few crops show something else.
    """
    shown = _views().get(image_id)
    kept = [i for i, crop in enumerate(crops) if shown is None or not same_picture(crop, shown)]
    if len(kept) < candidates - 1:
        raise ValueError(f"only {len(kept)} crops show something else than {image_id}")
    return kept[: candidates - 1]


def random_crops(count: int) -> tuple[Crop, ...]:
    """Square crops of the photographs at random places and of random sizes, the photographs in turn."""
    rng, found = np.random.default_rng(SEED), []
    for number in range(count):
        photo = PHOTOS[number % len(PHOTOS)]
        side = round(min(photo.width, photo.height) * rng.uniform(SMALLEST_SIDE, 1))
        left, top = rng.integers(0, photo.width - side + 1), rng.integers(0, photo.height - side + 1)
        found.append(Crop(photo.name, number, (int(left), int(top), int(left) + side, int(top) + side)))
    return tuple(found)


def same_picture(one: Crop, other: Crop) -> bool:
    """Whether two crops share more than `SAME` of the area that they show together."""
    if one.photo != other.photo:
        return False
    (a, b, c, d), (e, f, g, h) = one.box, other.box
    shared = max(0, min(c, g) - max(a, e)) * max(0, min(d, h) - max(b, f))
    return shared > SAME * ((c - a) * (d - b) + (g - e) * (h - f) - shared)


@lru_cache(maxsize=1)
def _views() -> dict[str, Crop]:
    return {crop_id(crop, split): crop for split in ("train", "test") for crop in photo_crops(split)}
