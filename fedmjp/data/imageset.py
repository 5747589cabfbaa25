"""A lazy set of labelled images: labels and ids in memory, pixels decoded on demand.

Images are prepared by the usual evaluation transform of ImageNet models (torchvision's `Resize(size, BICUBIC)` then
`CenterCrop(size)`), with one departure: an image of size x size pixels is never resampled, because reconstructions are
scored against exactly these pixels. EXIF orientation is ignored, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import IMAGES

# Exceptions that Pillow raises for damaged files; PNG files can raise SyntaxError, some TIFF files ValueError.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
KEPT_BYTES = 1 << 30  # the largest set that `ImageSet.keep` holds in memory


class ImageSet:
    """Labelled images that are decoded on demand.

    Args:
        open_image: index in 0..n-1 -> PIL image of any mode and size; must be picklable if the set is pickled.
        labels: n class indices in 0..len(classes)-1.
        ids: n names that identify the images in tables and messages.
        classes: the class names, in label order.
        size: side in pixels of the returned images.

    Attributes:
        labels: LongTensor (n,).
        ids: list of n strings.
        classes: list of strings.
        size: int, pixels.
        kind: what the set holds, one of the words of `fedmjp.data.catalog`.

    Raises:
        UsageError: `labels` and `ids` differ in length or a label has no class name.
    """

    kind: ClassVar[str] = IMAGES

    def __init__(
        self,
        open_image: Callable[[int], Image.Image],
        labels: Sequence[int] | torch.Tensor,
        ids: Sequence[str],
        classes: Sequence[str],
        size: int,
    ) -> None:
        self.labels = torch.as_tensor(labels, dtype=torch.long)  # (n,)
        self.ids = list(ids)
        self.classes = list(classes)
        self.size = size
        self._open = open_image
        self._rows = np.arange(len(self.ids))
        self._kept: np.ndarray | None = None  # (n, size, size, 3) uint8
        if len(self.labels) != len(self.ids):
            raise UsageError(f"{len(self.labels)} labels for {len(self.ids)} images; give one label per image")
        if len(self) and (int(self.labels.min()) < 0 or int(self.labels.max()) >= len(self.classes)):
            raise UsageError(
                f"labels span {int(self.labels.min())}..{int(self.labels.max())} but there are "
                f"{len(self.classes)} classes; use a labelled split whose labels count from 0"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def images(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Decode the images at `indices`.

        Returns:
            FloatTensor (B, 3, size, size) in [0, 1], in the order of `indices`.

        Raises:
            IndexError: an index is outside 0..n-1.
            UsageError: an image cannot be decoded; the message names it.
        """
        # 8-bit values until the whole batch is converted: one conversion per batch, and a quarter of the memory.
        return torch.from_numpy(self._pixels(indices)).float().div_(255)

    def keep(self) -> np.ndarray | None:
        """Decode all images now, and answer from memory from then on, for readers that ask for each image many times.

        Returns:
            (n, size, size, 3) uint8, not to be written to; None for a set of more than `KEPT_BYTES`, which goes on
            decoding on demand.

        Raises:
            UsageError: see `images`.
        """
        if self._kept is None and len(self) * 3 * self.size**2 <= KEPT_BYTES:
            kept = np.empty((len(self), self.size, self.size, 3), dtype=np.uint8)
            for index in range(len(self)):
                kept[index] = self.pixels(index)
            self._kept = kept
        return self._kept

    def pixels(self, index: int) -> np.ndarray:
        """Image number `index`, (size, size, 3) uint8, not to be written to.

        Raises:
            IndexError, UsageError: see `images`.
        """
        self._check(index)
        if self._kept is not None:
            return self._kept[index]
        try:
            picture = to_square_rgb(self._open(int(self._rows[index])), self.size)
        except DECODE_ERRORS as error:
            raise UsageError(f"cannot decode image {self.ids[index]!r} ({error}); remove or replace it") from error
        return np.asarray(picture)

    def contents(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> list[bytes]:
        """What tells the images at `indices` from others, the same on every machine: their 8-bit pixels (C, H, W).

        Raises:
            IndexError, UsageError: see `images`.
        """
        return [pixels.tobytes() for pixels in self._pixels(indices)]

    def _pixels(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
        """(B, 3, size, size) uint8."""
        batch = np.empty((len(indices), 3, self.size, self.size), dtype=np.uint8)
        for slot, index in enumerate(int(i) for i in indices):
            batch[slot] = self.pixels(index).transpose(2, 0, 1)
        return batch

    def targets(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """What a model is trained to say of the images at `indices`: their classes, (B,) int64."""
        return self.labels[torch.as_tensor(indices)]

    def subset(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> ImageSet:
        """Return the set of the images at `indices`, in that order, over the same source and classes.

        Raises:
            IndexError: an index is outside 0..n-1.
        """
        picked = [int(i) for i in indices]
        for index in picked:
            self._check(index)
        part = self._of_rows(picked)
        part._rows = self._rows[picked]
        return part

    def _of_rows(self, picked: list[int]) -> ImageSet:
        """A set with the labels and ids of some rows; `subset` tells it which rows of the source they are."""
        return ImageSet(self._open, self.labels[picked], [self.ids[i] for i in picked], self.classes, self.size)

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index} in a set of {len(self)}; indices run from 0 to {len(self) - 1}")


def to_square_rgb(picture: Image.Image, size: int) -> Image.Image:
    """Return `picture` as RGB of size x size pixels.

    The shorter side is resized to `size` (bicubic, antialiased), then the centre is cropped.

    Args:
        picture: any mode; transparency is dropped, 16-bit grey is scaled to 8 bits.
        size: side of the result in pixels.

    Raises:
        ValueError: the picture is so elongated that the resized one would exceed Pillow's limit of pixels.
    """
    picture = _to_rgb(picture)
    width, height = picture.size
    if min(width, height) != size:
        short = min(width, height)
        width, height = size * width // short, size * height // short
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"{picture.size[0]} x {picture.size[1]} pixels are too long a strip")
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        width, height = picture.size
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.crop((left, top, left + size, top + size))


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB":
        return picture
    if picture.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255 when it converts, which turns most of such an image white.
        grey = np.asarray(picture).astype(np.float64) / 257
        picture = Image.fromarray(np.clip(grey.round(), 0, 255).astype(np.uint8))
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def choose(count: int, limit: int | None, seed: int) -> np.ndarray:
    """Return sorted indices in 0..count-1: all of them, or `limit` randomly chosen ones determined by `seed`."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:limit])
