"""k-nearest neighbours on frozen features, weighted by likeness (Wu et al. 2018, as DINO and MST evaluate).

Each of the k training images most similar to a test image, by the cosine of their features, votes for its class with
exp(cosine / T), T = 0.07.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.registry import UsageError
from fedmjp.data import DataBundle
from fedmjp.evaluation.features import Pool, features
from fedmjp.models import BuiltModel

TEMPERATURE = 0.07
BATCH = 256


def neighbour_votes(
    train: Tensor, labels: Tensor, test: Tensor, k: int, classes: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Votes (m, classes) for m test features.

    Args:
        train: (n, D) features.
        labels: (n,) int64.
        test: (m, D) features.
        k: neighbours, in 1..n.
        classes: number of classes.

    Raises:
        UsageError: k is out of range.
    """
    if not 1 <= k <= len(train):
        raise UsageError(f"k-NN takes 1 to {len(train)} neighbours (training images), not {k}")
    train, votes = F.normalize(train, dim=1), []
    for rows in F.normalize(test, dim=1).split(BATCH):
        likeness, nearest = (rows @ train.T).topk(k, dim=1)  # (B, k)
        weights = (likeness / temperature).exp()
        votes.append(weights.new_zeros(len(rows), classes).scatter_add_(1, labels[nearest], weights))
    return torch.cat(votes)


def neighbour_accuracy(
    model: BuiltModel, data: DataBundle, device: torch.device, ks: Sequence[int] = (20,), pool: Pool = "class"
) -> dict[int, float]:
    """Top-1 accuracy in [0, 1] of the test images for each k, on features of unchanged images.

    Raises:
        UsageError: see `features` and `neighbour_votes`.
    """
    train, test = (features(model, images, device, pool) for images in (data.train, data.test))
    return {
        k: float(
            (neighbour_votes(train, data.train.labels, test, k, len(data.classes)).argmax(dim=1) == data.test.labels)
            .float()
            .mean()
        )
        for k in ks
    }
