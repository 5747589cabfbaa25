"""Training inputs with random augmentation, one data set class for each kind of data.

Images are cropped, flipped and changed by RandAugment (timm); label maps are cropped and flipped with their images, and
RandAugment, which would move pixels without them, is not used; words are shifted in time by up to a tenth of a second,
as in Speech Commands' own recipe, the first or last frame filling the gap. That recipe's background noise is left out.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import Image as Picture
from torchvision.tv_tensors import Mask

from fedmjp.data import ImageSet
from fedmjp.data.catalog import IMAGES, LABEL_MAPS, SPEECH
from fedmjp.data.frames import FrameSet
from fedmjp.data.labelmaps import LabelMapSet
from fedmjp.training.config import Recipe

# Decoded images are kept in memory up to this size; a larger set is decoded again in every epoch.
KEPT_BYTES = 1 << 30
LARGEST_SHIFT = 10  # frames of 10 ms


class Augmented(Dataset):
    """Inputs of a set, drawn anew at each access.

    Args:
        images: the set.
        recipe: gives `smallest_crop` and `rand_augment`.
    """

    def __init__(self, images: ImageSet, recipe: Recipe) -> None:
        self.images, self.recipe = images, recipe

    def __len__(self) -> int:
        return len(self.images)


class AugmentedImages(Augmented):
    """Images (3, size, size) uint8 and their classes."""

    def __init__(self, images: ImageSet, recipe: Recipe) -> None:
        super().__init__(images, recipe)
        self.kept = _decoded(images) if len(images) * 3 * images.size**2 <= KEPT_BYTES else None
        self.transform = create_transform(
            images.size,
            is_training=True,
            scale=(recipe.smallest_crop, 1.0),
            color_jitter=None,
            auto_augment=None if recipe.rand_augment == "none" else recipe.rand_augment,
            interpolation="bicubic",
            normalize=False,
        )

    def pixels(self, index: int) -> np.ndarray:
        """Image number `index` as it is, (size, size, 3) uint8."""
        return _decode(self.images, [index])[0] if self.kept is None else self.kept[index]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels(index))), int(self.images.labels[index])


class AugmentedMaps(AugmentedImages):
    """Images (3, size, size) uint8 and their label maps (size, size) int64."""

    def __init__(self, images: LabelMapSet, recipe: Recipe) -> None:
        super().__init__(images, recipe)
        self.maps = None if self.kept is None else _decoded_maps(images)
        crop = v2.RandomResizedCrop(
            images.size, (recipe.smallest_crop, 1.0), interpolation=v2.InterpolationMode.BICUBIC
        )
        self.transform = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        labels = self.images.targets([index])[0] if self.maps is None else self.maps[index].long()
        pair = Picture(torch.from_numpy(self.pixels(index)).permute(2, 0, 1)), Mask(labels)
        image, labels = (part.as_subclass(Tensor) for part in self.transform(*pair))
        return image, labels


class ShiftedFrames(Augmented):
    """Frames (40, 1, T) in [0, 1] and their classes."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        frames = self.images.images([index])[0]
        shift = int(torch.randint(-LARGEST_SHIFT, LARGEST_SHIFT + 1, ()))
        places = (torch.arange(frames.shape[-1]) - shift).clamp(0, frames.shape[-1] - 1)
        return frames[..., places], int(self.images.labels[index])


_OF_KIND = {IMAGES: AugmentedImages, LABEL_MAPS: AugmentedMaps, SPEECH: ShiftedFrames}


def augmented(images: ImageSet | LabelMapSet | FrameSet, recipe: Recipe) -> Augmented:
    """The data set class for what `images` holds."""
    return _OF_KIND[images.kind](images, recipe)


@lru_cache(maxsize=1)
def _decoded_maps(images: LabelMapSet) -> Tensor:
    """All label maps of a set, (n, size, size) uint8, cached like `_decoded`."""
    parts = [images.targets(range(i, min(i + 1024, len(images)))).byte() for i in range(0, len(images), 1024)]
    return torch.cat(parts)


@lru_cache(maxsize=1)
def _decoded(images: ImageSet) -> np.ndarray:
    """All images of a set, (n, size, size, 3) uint8, cached for consecutive trainings; must not be written to."""
    return _decode(images, range(len(images)))


def _decode(images: ImageSet, indices: range | list[int]) -> np.ndarray:
    """The images at `indices`, (B, size, size, 3) uint8."""
    pixels = np.empty((len(indices), images.size, images.size, 3), dtype=np.uint8)
    for start in range(0, len(indices), 1024):
        part = images.images(indices[start : start + 1024])
        pixels[start : start + len(part)] = part.mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    return pixels
