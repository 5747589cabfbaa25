"""Crops of the photographs in a folder, for attacks that learn how a model sees images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attacks.registry import UsageError

# Least area of a crop, as a share of the largest square of its photograph; shorter side that is kept of a photograph.
LEAST_AREA, KEPT_SIDE = 0.25, 320
# Files that are taken for photographs, and what they may hold: parsers of other formats are not called.
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP")


def photograph_crops(
    folder: str, sizes: Iterable[int], image_shape: tuple[int, int, int], seed: int
) -> Iterator[Tensor]:
    """Batches (B, C, H, W) float32 in [0, 1]: squares at random places of all photographs in turn, half mirrored.

    Args:
        folder: of image files, at any depth.
        sizes: B of each batch.
        image_shape: (3, H, W), H = W.

    Raises:
        UsageError: no such folder, no photograph in it, one that cannot be read, or images that are not square or of
            three channels.
    """
    channels, height, width = image_shape
    if channels != 3 or height != width:
        raise UsageError(f"photographs are cropped to squares of three channels, and the model takes {image_shape}")
    pictures, random = _pictures(folder), np.random.default_rng(seed)
    turns = cycle(pictures)
    for size in sizes:
        yield torch.stack([_crop(next(turns), height, random) for _ in range(size)])


def _crop(picture: Image.Image, width: int, random: np.random.Generator) -> Tensor:
    side = round(random.uniform(LEAST_AREA, 1) ** 0.5 * min(picture.size))
    left, top = (int(random.integers(0, length - side + 1)) for length in picture.size)
    box = (left, top, left + side, top + side)
    pixels = np.array(picture.resize((width, width), Image.Resampling.BICUBIC, box=box))
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    return image.flip(-1) if random.random() < 0.5 else image


@lru_cache(maxsize=2)
def _pictures(folder: str) -> list[Image.Image]:
    """All images of a folder in the order of their names, reduced to `KEPT_SIDE`."""
    if not Path(folder).is_dir():
        raise UsageError(f"no folder of photographs at {folder}")
    found = []
    for path in sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES):
        try:
            with Image.open(path, formats=FORMATS) as opened:
                picture = opened.convert("RGB")
        except (OSError, Image.DecompressionBombError) as error:
            raise UsageError(f"the photograph {path} cannot be read ({error}); mend it or take it away") from error
        factor = min(1.0, KEPT_SIDE / min(picture.size))
        size = tuple(max(1, round(factor * length)) for length in picture.size)
        found.append(picture.resize(size, Image.Resampling.BICUBIC))
    if not found:
        raise UsageError(f"the folder {folder} holds no image ({', '.join(SUFFIXES)})")
    return found
