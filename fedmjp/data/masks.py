"""Folders of images with label maps, in the layout of ADE20K's scene parsing archive (ADEChallengeData2016):

images/training/NAME.jpg       annotations/training/NAME.png
images/validation/NAME.jpg     annotations/validation/NAME.png      objectInfo150.txt

A label map holds 0 where a pixel is ignored, and class k of the list as k, counted from 1. The list is any
objectInfo*.txt: a line of headings, then a class a line, with its name in the last of the columns that tabs divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.folder import FORMATS, SUFFIXES, FileImages, openable
from fedmjp.data.labelmaps import IGNORED, LabelMapSet

PARTS = ("training", "validation")
LAYOUT = "images/{training,validation}/NAME.jpg and annotations/{training,validation}/NAME.png"


@dataclass(frozen=True)
class FileMaps:
    """Opens label maps.

    Attributes:
        root: the folder.
        files: names of the maps relative to `root`.
        last: largest class, counted from 1.
    """

    root: Path
    files: list[str]
    last: int

    def __call__(self, index: int) -> Image.Image:
        """The map of file number `index`, classes from 0 and `IGNORED`.

        Raises:
            UsageError: it is no 8-bit map of one channel, or holds a class that is not in the list.
            OSError, SyntaxError, ValueError: it cannot be decoded; see `imageset.DECODE_ERRORS`.
        """
        with Image.open(self.root / self.files[index], formats=FORMATS) as picture:
            if picture.mode not in ("L", "P"):
                raise UsageError(
                    f"label map {self.files[index]} has mode {picture.mode}; save it as 8-bit grey or palette values"
                )
            values = np.asarray(picture)
        if values.max(initial=0) > self.last:
            raise UsageError(
                f"label map {self.files[index]} holds class {values.max()}, but the list of classes ends at "
                f"{self.last}; correct the map or the list"
            )
        return Image.fromarray(np.where(values == 0, IGNORED, values - 1).astype(np.uint8))


def load_masks(request: Request) -> DataBundle:
    """Load the folder `request.path`.

    Raises:
        UsageError: the folder, one of its parts, the list of classes or a label map is missing, or no image opens.
    """
    if request.path is None:
        raise UsageError("no folder given; write masks:PATH with the path of a folder in ADE20K's layout")
    root = request.path.expanduser()
    classes = _classes(root)
    skipped: list[str] = []
    limits = request.train_limit, request.test_limit
    train, test = (
        _part(root, part, limit, classes, request, skipped) for part, limit in zip(PARTS, limits, strict=True)
    )
    provenance = f"label maps {root.resolve().name}/ ({len(classes)} classes; ADE20K's layout, its own split)"
    return DataBundle(train, test, classes, f"masks:{request.path}", provenance, skipped)


def _classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise UsageError(f"no folder at {root}; give a folder that holds {LAYOUT}")
    lists = sorted(root.glob("objectInfo*.txt"))
    if not lists:
        raise UsageError(f"{root} holds no objectInfo150.txt; write one: a line of headings, then a class a line")
    names = [line.split("\t")[-1].strip() for line in lists[0].read_text(encoding="utf-8").splitlines()[1:] if line]
    if not 0 < len(names) <= IGNORED:
        raise UsageError(f"{lists[0]} names {len(names)} classes; 8-bit label maps hold 1 to {IGNORED}")
    return names


def _part(
    root: Path, part: str, limit: int | None, classes: list[str], request: Request, skipped: list[str]
) -> LabelMapSet:
    """The images of one part that can be opened."""
    for kind in ("images", "annotations"):
        if not (root / kind / part).is_dir():
            raise UsageError(f"no folder {root / kind / part}; lay the files out as {LAYOUT}")
    files = sorted(
        f"images/{part}/{file.name}"
        for file in (root / "images" / part).iterdir()
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise UsageError(f"no image found in {root / 'images' / part}; lay the files out as {LAYOUT}")
    good = openable(root, files, limit, request.seed, skipped)
    maps = [f"annotations/{part}/{Path(file).stem}.png" for file in good]
    missing = [name for name in maps if not (root / name).is_file()]
    if missing:
        raise UsageError(f"{len(missing)} of {len(maps)} images in {part} have no label map; the first is {missing[0]}")
    return LabelMapSet(FileImages(root, good), FileMaps(root, maps, len(classes)), good, classes, request.size)
