"""Training batches: order, augmentation and mixing, all by timm.

Cropping, flipping and RandAugment act on single images; erasing, Mixup and CutMix act on the batch, as in timm's
prefetching loader. Except for erased pixels the result stays in [0, 1], so that the defence's jigsaw and the
objective's normalisation get the same kind of input as in a client.

Departs from DeiT: a data set returns its images already at the model's size, so a random crop is taken from that square
and not from the file at its full resolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.utils import random_seed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import Image as Picture
from torchvision.tv_tensors import Mask

from attacks import UsageError
from fedmjp.data import ImageSet
from fedmjp.data.labelmaps import LabelMapSet
from fedmjp.models import BuiltModel
from fedmjp.training.config import Recipe

# Decoded images are kept in memory up to this size; a larger set is decoded again in every epoch.
KEPT_BYTES = 1 << 30


class Augmented(Dataset):
    """Images of a set with random cropping, flipping and RandAugment, drawn anew at each access.

    Label maps are cropped and flipped with their images; RandAugment would move pixels without them and is not used.

    Args:
        images: the set.
        recipe: gives `smallest_crop` and `rand_augment`.
    """

    def __init__(self, images: ImageSet, recipe: Recipe) -> None:
        self.images = images
        pixels = len(images) * 3 * images.size**2
        self.kept = _decoded(images) if pixels <= KEPT_BYTES else None
        self.maps = _decoded_maps(images) if images.per_pixel and self.kept is not None else None
        self.transform = (
            _with_maps(images.size, recipe)
            if images.per_pixel
            else create_transform(
                images.size,
                is_training=True,
                scale=(recipe.smallest_crop, 1.0),
                color_jitter=None,
                auto_augment=None if recipe.rand_augment == "none" else recipe.rand_augment,
                interpolation="bicubic",
                normalize=False,
            )
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Image number `index`, augmented, (3, size, size) uint8, and its label or label map (size, size) int64."""
        pixels = _decode(self.images, [index])[0] if self.kept is None else self.kept[index]
        if not self.images.per_pixel:
            return self.transform(Image.fromarray(pixels)), int(self.images.labels[index])
        labels = self.images.targets([index])[0] if self.maps is None else self.maps[index].long()
        pair = Picture(torch.from_numpy(pixels).permute(2, 0, 1)), Mask(labels)
        return tuple(part.as_subclass(Tensor) for part in self.transform(*pair))


class Batches:
    """Augmented batches, epoch by epoch.

    Args:
        images: the training images.
        recipe: gives batch size, augmentation and mixing.
        model: gives the normalisation; erasing draws its noise in normalised units.
        seed: together with an epoch's number it determines that epoch's batches.
        workers: processes that decode and augment images; 0 for none.

    Raises:
        UsageError: there are fewer images than in one batch.
    """

    def __init__(self, images: ImageSet, recipe: Recipe, model: BuiltModel, seed: int, workers: int = 0) -> None:
        if len(images) < recipe.batch_size:
            raise UsageError(f"--batch-size {recipe.batch_size} is more than the {len(images)} training images")
        self.recipe, self.model, self.seed, self.classes = recipe, model, seed, len(images.classes)
        dataset = Augmented(images, recipe)
        self.sampler = RepeatAugSampler(dataset, num_replicas=1, rank=0, num_repeats=recipe.repeats, selected_round=0)
        self.loader = DataLoader(dataset, recipe.batch_size, sampler=self.sampler, num_workers=workers, drop_last=True)
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            alphas = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix}
            self.mixup = Mixup(**alphas, label_smoothing=recipe.label_smoothing, num_classes=self.classes)

    def __len__(self) -> int:
        """Number of steps in an epoch."""
        return len(self.loader)

    def epoch(self, number: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch `number` (from 1): images (B, C, H, W) and soft labels (B, classes) or label maps
        (B, H, W) int64, on `device`.

        All global random generators are seeded first, so that an epoch's batches do not depend on earlier epochs.
        """
        entropy = int(np.random.SeedSequence([self.seed, 4, number]).generate_state(1)[0])
        random_seed(entropy)
        self.sampler.set_epoch(entropy)
        erase = RandomErasing(self.recipe.erasing, mode="pixel", device=str(device))
        mean, std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (self.model.mean, self.model.std))
        for pixels, labels in self.loader:
            images, labels = pixels.to(device).float().div_(255), labels.to(device)
            if self.recipe.erasing:
                images = erase(self.model.normalise(images)) * std + mean
            yield (images, labels) if labels.ndim > 1 else self._mixed(images, labels)

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.mixup is not None:
            return self.mixup(images, labels)
        return images, mixup_target(labels, self.classes, smoothing=self.recipe.label_smoothing)


def _with_maps(size: int, recipe: Recipe) -> v2.Transform:
    """Random crop and flip of an image, uint8, together with its label map."""
    crop = v2.RandomResizedCrop(size, (recipe.smallest_crop, 1.0), interpolation=v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip()])


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
