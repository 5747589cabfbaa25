"""Training inputs with random augmentation by timm: one data set class for each kind of data, and what acts on batches.

Single images are cropped, flipped and changed by RandAugment; erasing, Mixup and CutMix act on the batch, as in timm's
prefetching loader. Except for erased pixels the result stays in [0, 1]. Label maps are cropped and flipped with their
images, and RandAugment, which would move pixels without them, is not used; words are shifted in time by up to a tenth
of a second, as in Speech Commands' own recipe, the first or last frame filling the gap. That recipe's background noise
is left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.utils import random_seed
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import Image as Picture
from torchvision.tv_tensors import Mask

from fedmjp.data.augmentations import Augmentation
from fedmjp.data.catalog import IMAGES, LABEL_MAPS, SPEECH
from fedmjp.data.frames import FrameSet
from fedmjp.data.imageset import ImageSet
from fedmjp.data.labelmaps import LabelMapSet

LARGEST_SHIFT = 10  # frames of 10 ms


class Augmented(Dataset):
    """Inputs of a set, drawn anew at each access.

    Args:
        images: the set.
        augmentation: gives `smallest_crop`, `rand_augment`, `mirror` and `colour`.
    """

    def __init__(self, images: ImageSet, augmentation: Augmentation) -> None:
        self.images, self.augmentation = images, augmentation

    def __len__(self) -> int:
        return len(self.images)


class AugmentedImages(Augmented):
    """Images (3, size, size) uint8 and their classes."""

    def __init__(self, images: ImageSet, augmentation: Augmentation) -> None:
        super().__init__(images, augmentation)
        self.kept = images.keep() is not None  # in memory from now on, where they fit
        self.transform = create_transform(
            images.size,
            is_training=True,
            scale=(augmentation.smallest_crop, 1.0),
            color_jitter=augmentation.colour or None,
            hflip=augmentation.mirror,
            auto_augment=None if augmentation.rand_augment == "none" else augmentation.rand_augment,
            interpolation="bicubic",
            normalize=False,
        )

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images.pixels(index))), int(self.images.labels[index])


class AugmentedMaps(AugmentedImages):
    """Images (3, size, size) uint8 and their label maps (size, size) int64."""

    def __init__(self, images: LabelMapSet, augmentation: Augmentation) -> None:
        super().__init__(images, augmentation)
        self.maps = _decoded_maps(images) if self.kept else None
        crop = v2.RandomResizedCrop(
            images.size, (augmentation.smallest_crop, 1.0), interpolation=v2.InterpolationMode.BICUBIC
        )
        self.transform = v2.Compose([crop, v2.RandomHorizontalFlip(augmentation.mirror)])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        labels = self.images.targets([index])[0] if self.maps is None else self.maps[index].long()
        pair = Picture(torch.from_numpy(self.images.pixels(index)).permute(2, 0, 1)), Mask(labels)
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


def augmented(images: ImageSet | LabelMapSet | FrameSet, augmentation: Augmentation) -> Augmented:
    """The data set class for what `images` holds."""
    return _OF_KIND[images.kind](images, augmentation)


class BatchAugmentation:
    """What acts on a whole batch: erasing, Mixup and CutMix, and labels as probabilities.

    Args:
        augmentation: the settings.
        classes: number of classes.
        mean, std: the normalisation of the model, one number a channel; erasing draws its noise in normalised units.
    """

    def __init__(self, augmentation: Augmentation, classes: int, mean: Sequence[float], std: Sequence[float]) -> None:
        self.augmentation, self.classes, self.mean, self.std = augmentation, classes, mean, std
        self.mixup = None
        if augmentation.mixes:
            alphas = {"mixup_alpha": augmentation.mixup, "cutmix_alpha": augmentation.cutmix}
            self.mixup = Mixup(**alphas, label_smoothing=augmentation.label_smoothing, num_classes=classes)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as it is trained on, by the global random generators.

        Args:
            images: (B, C, H, W), uint8 or in [0, 1].
            labels: (B,) int64, or label maps (B, H, W), which stay as they are.

        Returns:
            images (B, C, H, W), in [0, 1] but for erased pixels, and labels (B, classes) or (B, H, W).
        """
        images = images.float().div_(255) if images.dtype == torch.uint8 else images
        if self.augmentation.erasing:
            mean, std = (torch.tensor(v, device=images.device).view(1, -1, 1, 1) for v in (self.mean, self.std))
            erase = RandomErasing(self.augmentation.erasing, mode="pixel", device=str(images.device))
            images = erase((images - mean) / std) * std + mean
        if labels.ndim > 1:
            return images, labels
        if self.mixup is not None:
            return self.mixup(images, labels)
        return images, mixup_target(labels, self.classes, smoothing=self.augmentation.label_smoothing)


class AugmentedBatches:
    """Batches of given images, each drawn anew; the same numbers for the same seed.

    Args:
        images: the set.
        augmentation: the settings.
        mean, std: see `BatchAugmentation`.
    """

    def __init__(
        self, images: ImageSet, augmentation: Augmentation, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.softens = augmentation.softens  # whether labels become probabilities
        self.single = augmented(images, augmentation)
        self.whole = BatchAugmentation(augmentation, len(images.classes), mean, std)

    def draw(self, indices: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) images and (B, classes) probabilities of the images at `indices`."""
        with seeded(seed):
            pairs = [self.single[index] for index in indices]
            pixels = torch.stack([torch.as_tensor(image) for image, _ in pairs])
            return self.whole(pixels, torch.tensor([label for _, label in pairs]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global random generators of the CPU start from `seed` inside, and go on afterwards as if nothing was."""
    numbers, words = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            random_seed(seed % 2**32)  # numpy takes no larger one
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(words)


@lru_cache(maxsize=1)
def _decoded_maps(images: LabelMapSet) -> Tensor:
    """All label maps of a set, (n, size, size) uint8, cached for consecutive trainings."""
    parts = [images.targets(range(i, min(i + 1024, len(images)))).byte() for i in range(0, len(images), 1024)]
    return torch.cat(parts)
