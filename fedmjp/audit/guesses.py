"""The two guesses that need no gradient, for images whose data set is not at hand.

A run of ours takes the mean image of its training set and another image of its test set. For a user's own batch, and
where the set is a single image, both come from the photographs that are embedded in scikit-image: the mean of the
crops' training half, and crops of the other half. They know less of the user's data than an adversary might, so that an
attack beats them a little too easily.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.registry import UsageError
from fedmjp.data import load_data
from fedmjp.metrics import MEAN_IMAGE, OTHER_IMAGE, mean_image

ORIGIN = (
    "the guesses mean_image and other_image are made of the photographs embedded in scikit-image, because the audited "
    "images' own data set is not known"
)
SINGLE = (
    "the guesses mean_image and other_image are made of the photographs embedded in scikit-image, because those of a "
    "single image would be the image itself"
)
# Mean squared difference below which an embedded photograph is the image itself.
IDENTICAL = 1e-4


def embedded_guesses(images: Tensor) -> dict[str, Tensor]:
    """Name of the guess -> (B, C, H, W) in [0, 1], for colour or grey images; none for other numbers of channels.

    Args:
        images: (B, C, H, W) in [0, 1], of any size; another image is never the image itself.
    """
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        return {}
    photos = load_data("photos", size=max(height, width))

    def fitted(photographs: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, C, H, W), the middle part."""
        top, left = (photographs.shape[2] - height) // 2, (photographs.shape[3] - width) // 2
        cut = photographs[:, :, top : top + height, left : left + width]
        return cut.mean(dim=1, keepdim=True) if channels == 1 else cut

    mean = fitted(mean_image(photos.train.images(list(range(len(photos.train))))))
    others = fitted(photos.test.images(list(range(min(len(photos.test), 2 * len(images) + 1)))))
    chosen = [_another(image, others.to(image), index) for index, image in enumerate(images)]
    return {
        MEAN_IMAGE: mean.to(images).expand(len(images), -1, -1, -1),
        OTHER_IMAGE: torch.stack(chosen),
    }


def guesses_beside(images: Tensor) -> dict[str, Tensor]:
    """`embedded_guesses` for images, (B, C, H, W), of a set that has no other to guess from.

    Raises:
        UsageError: images of other than one or three channels.
    """
    found = embedded_guesses(images)
    if not found:
        raise UsageError("a set of one image leaves no guess to compare an attack with; pass at least two that differ")
    return found


def without_copies(others: Tensor, images: Tensor, guess: str = OTHER_IMAGE) -> Tensor:
    """`others` with embedded photographs in place of those that are the image itself, as in sets that hold it twice.

    Args:
        others: (B, C, H, W), a guess for each of `images`.
        guess: which of the two it is.

    Raises:
        UsageError: see `guesses_beside`.
    """
    copies = _distance(others, images) <= IDENTICAL
    if not copies.any():
        return others
    return torch.where(copies[:, None, None, None], guesses_beside(images)[guess].to(others), others)


def _distance(others: Tensor, images: Tensor) -> Tensor:
    """(B,) mean squared difference of a pixel."""
    return (others - images).square().flatten(1).mean(dim=1)


def _another(image: Tensor, others: Tensor, index: int) -> Tensor:
    """One of `others` that is not `image`, a different one for each index."""
    different = others[_distance(others, image) > IDENTICAL]
    return different[index % len(different)]
