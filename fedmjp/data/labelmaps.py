"""Images with a class for each pixel, decoded on demand like `ImageSet`.

Label maps follow their images' geometry with nearest neighbours: shorter side to `size`, then the centre. So scores are
of the square that the model sees, not of the whole picture at its own resolution as ADE20K's own protocol has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import LABEL_MAPS
from fedmjp.data.imageset import DECODE_ERRORS, ImageSet

IGNORED = 255  # label of pixels that neither train nor count


class LabelMapSet(ImageSet):
    """Images whose labels are maps.

    Args:
        open_image: see `ImageSet`.
        open_map: index in 0..n-1 -> PIL image of 8-bit values, the classes from 0, or `IGNORED`; as large as the image.
        ids: n names that identify the images in tables and messages.
        classes: the class names, in label order, at most 255.
        size: side in pixels of the returned images and maps.

    Attributes:
        labels: zeros (n,), because an image of this set has no class of its own; see `targets`.

    Raises:
        UsageError: more classes than 8-bit maps can hold.
    """

    kind: ClassVar[str] = LABEL_MAPS

    def __init__(
        self,
        open_image: Callable[[int], Image.Image],
        open_map: Callable[[int], Image.Image],
        ids: Sequence[str],
        classes: Sequence[str],
        size: int,
    ) -> None:
        super().__init__(open_image, [0] * len(ids), ids, classes, size)
        if len(classes) > IGNORED:
            raise UsageError(f"{len(classes)} classes do not fit into 8-bit label maps; join some of them")
        self._open_map = open_map

    def targets(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Decode the label maps at `indices`.

        Returns:
            (B, size, size) int64: classes, or `IGNORED`.

        Raises:
            IndexError: an index is outside 0..n-1.
            UsageError: a map cannot be decoded, has another size than its image, or holds a class that has no name.
        """
        batch = np.empty((len(indices), self.size, self.size), dtype=np.uint8)
        for slot, index in enumerate(int(i) for i in indices):
            self._check(index)
            batch[slot] = self._decode_map(index)
        return torch.from_numpy(batch).long()

    def _decode_map(self, index: int) -> np.ndarray:
        name, row = self.ids[index], int(self._rows[index])
        try:
            size, labels = self._open(row).size, self._open_map(row)
        except DECODE_ERRORS as error:
            raise UsageError(f"cannot decode image {name!r} or its label map ({error}); replace it") from error
        if labels.size != size:
            raise UsageError(
                f"the label map of {name!r} is {labels.size[0]} x {labels.size[1]} pixels, its image "
                f"{size[0]} x {size[1]}; they must be alike"
            )
        found = np.asarray(labels)  # (H, W) uint8
        strange = found[(found != IGNORED) & (found >= len(self.classes))]
        if len(strange):
            raise UsageError(
                f"the label map of {name!r} holds class {int(strange[0])} (from 0), but only {len(self.classes)} "
                "classes have names; correct the map or the list of classes"
            )
        return np.asarray(_to_square(labels, self.size))

    def _of_rows(self, picked: list[int]) -> LabelMapSet:
        return LabelMapSet(self._open, self._open_map, [self.ids[i] for i in picked], self.classes, self.size)


def _to_square(labels: Image.Image, size: int) -> Image.Image:
    """As `imageset.to_square_rgb`, with nearest neighbours."""
    width, height = labels.size
    short = min(width, height)
    if short != size:
        width, height = size * width // short, size * height // short
        labels = labels.resize((width, height), Image.Resampling.NEAREST)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return labels.crop((left, top, left + size, top + size))
