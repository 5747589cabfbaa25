"""Is the original the nearest of 1,000 candidates to a reconstruction? A question that PSNR does not answer.

The candidates are the original and 999 random crops of the embedded photographs, the same ones for every submission. A
crop that shares more than half of the area that it and the original show together is left out as the same picture.
The embedding is that of LPIPS (squeeze, whose weights ship with this package; Zhang et al. 2018): the features of its
seven layers, each of unit length at every place and weighted as LPIPS weights it, averaged over a 2 x 2 grid of the
image; the distance is Euclidean. Chance is 0.1 %. A better embedding would find more: a share is what this one finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmjp.data.imageset import ImageSet
from fedmjp.data.photos import PHOTOS, Crop, CropImages, crop_id, photo_crops
from fedmjp.metrics import Lpips, load_lpips

GRID = 2  # places a side over which features are averaged
SPARE = 1.25  # drawn, for one that is needed
SMALLEST_SIDE = 0.3  # of a crop, as a share of the photograph's shorter side
SAME = 0.5  # share of the union of two crops' areas that both show, above which they are one picture
SEED = 20  # of the crops
BATCH = 128


def embed(images: Tensor, lpips: Lpips) -> Tensor:
    """(B, 3, H, W) in [0, 1] -> (B, F) float32 on the CPU; F is the same for images of one size."""
    network = lpips.network
    parameter = next(network.parameters())
    found = []
    with torch.no_grad():
        for batch in images.split(BATCH):
            scaled = network.scaling_layer(2 * batch.to(parameter) - 1)
            layers = []
            for features, weigh in zip(network.net.forward(scaled), network.lins, strict=True):
                weights = weigh.model[-1].weight.clamp(min=0).sqrt()  # (1, C, 1, 1)
                layers.append(functional.adaptive_avg_pool2d(functional.normalize(features) * weights, GRID).flatten(1))
            found.append(torch.cat(layers, dim=1).float().cpu())
    return torch.cat(found)


class Lineup:
    """Ranks reconstructions of images of one size.

    Args:
        size: side of the images in pixels.
        candidates: images in the lineup, the original among them.
        lpips: the embedding.
    """

    def __init__(self, size: int, candidates: int, lpips: Lpips) -> None:
        self.candidates, self.lpips = candidates, lpips
        self.crops = random_crops(int(SPARE * candidates))
        names = [photo.name for photo in PHOTOS]
        labels = [names.index(crop.photo) for crop in self.crops]
        pool = ImageSet(CropImages(list(self.crops)), labels, [str(c.number) for c in self.crops], names, size)
        self.pool = embed(pool.images(range(len(pool))), lpips)  # (pool, F)

    def ranks(self, originals: Tensor, reconstructions: Tensor, ids: Sequence[str]) -> list[int]:
        """Place of each original among its candidates, by their distance from the reconstruction; 1 is the nearest.

        Args:
            originals, reconstructions: (B, 3, H, W) in [0, 1].
            ids: of the originals; crops of the embedded photographs are left out where they show the same.
        """
        own = embed(originals, self.lpips)
        found = []
        for original, reconstruction, image_id in zip(own, embed(reconstructions, self.lpips), ids, strict=True):
            others = self.pool[torch.tensor(self._others(image_id))]
            nearer = (others - reconstruction).norm(dim=1) < (original - reconstruction).norm()
            found.append(1 + int(nearer.sum()))
        return found

    def _others(self, image_id: str) -> list[int]:
        """Indices of the other candidates of an original.

        Raises:
            ValueError: too few crops were drawn.
        """
        shown = _views().get(image_id)
        kept = [i for i, crop in enumerate(self.crops) if shown is None or not same_picture(crop, shown)]
        if len(kept) < self.candidates - 1:
            raise ValueError(f"only {len(kept)} crops show something else than {image_id}")
        return kept[: self.candidates - 1]


@lru_cache(maxsize=2)
def lineup_of(size: int, candidates: int) -> Lineup | None:
    """The lineup of images of a size, embedded once in a process; None where LPIPS has no weights here."""
    lpips = load_lpips()
    return None if lpips is None else Lineup(size, candidates, lpips)


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
