"""Training batches: order by timm's sampler, augmentation by `fedmjp.data.augmentation`.

Departs from DeiT: a data set returns its images already at the model's size, so a random crop is taken from that square
and not from the file at its full resolution.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from timm.utils import random_seed
from torch import Tensor
from torch.utils.data import DataLoader

from attacks import UsageError
from fedmjp.data import ImageSet
from fedmjp.data.augmentation import BatchAugmentation, augmented
from fedmjp.models import BuiltModel
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
        self.seed, settings = seed, recipe.augmentation()
        dataset = augmented(images, settings)
        self.sampler = RepeatAugSampler(dataset, num_replicas=1, rank=0, num_repeats=recipe.repeats, selected_round=0)
        self.loader = DataLoader(dataset, recipe.batch_size, sampler=self.sampler, num_workers=workers, drop_last=True)
        self.whole = BatchAugmentation(settings, len(images.classes), model.mean, model.std)

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
        for pixels, labels in self.loader:
            yield self.whole(pixels.to(device), labels.to(device))
