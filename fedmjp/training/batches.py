"""Training batches: order, augmentation and mixing, all by timm.

Cropping, flipping and RandAugment act on single images (`fedmjp.training.augmentation`); erasing, Mixup and CutMix act
on the batch, as in timm's prefetching loader. Except for erased pixels the result stays in [0, 1], so that the
defence's jigsaw and the objective's normalisation get the same kind of input as in a client.

Departs from DeiT: a data set returns its images already at the model's size, so a random crop is taken from that square
and not from the file at its full resolution.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.utils import random_seed
from torch import Tensor
from torch.utils.data import DataLoader

from attacks import UsageError
from fedmjp.data import ImageSet
from fedmjp.models import BuiltModel
from fedmjp.training.augmentation import augmented
from fedmjp.training.config import Recipe


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
        dataset = augmented(images, recipe)
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
            images, labels = pixels.to(device), labels.to(device)
            images = images.float().div_(255) if images.dtype == torch.uint8 else images
            if self.recipe.erasing:
                images = erase(self.model.normalise(images)) * std + mean
            yield (images, labels) if labels.ndim > 1 else self._mixed(images, labels)

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.mixup is not None:
            return self.mixup(images, labels)
        return images, mixup_target(labels, self.classes, smoothing=self.recipe.label_smoothing)
