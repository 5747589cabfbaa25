"""Image folders: CLASS/FILE, or train/CLASS/FILE beside val/CLASS/FILE (torchvision's `ImageFolder` layout).

A folder of pictures without class folders has no labels; objectives that need none train on it.

Files are opened and verified when the folder is loaded (`PIL.Image.verify`: headers, and checksums where the format
has them); pixels are decoded only on demand. With a limit, files are opened only until the limit is reached.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from attacks.registry import UsageError
from fedmjp.data.catalog import DataBundle, Request
from fedmjp.data.imageset import DECODE_ERRORS, ImageSet, choose

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Pillow's names of the formats that it decodes itself; EPS, whatever its file is called, would start Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
TEST_FOLDERS = ("val", "valid", "validation", "test")
TEST_SHARE = 0.2
UNLABELLED = "(no label)"


@dataclass(frozen=True)
class FileImages:
    """Opens image files.

    Attributes:
        root: the folder.
        files: names relative to `root`, "CLASS/FILE" or "train/CLASS/FILE".
    """

    root: Path
    files: list[str]

    def __call__(self, index: int) -> Image.Image:
        """The image of file number `index`, decoded.

        Raises:
            OSError, SyntaxError, ValueError: the file cannot be decoded; see `imageset.DECODE_ERRORS`.
        """
        # Loading inside the block closes the file: a large batch would otherwise exhaust the file handles.
        with Image.open(self.root / self.files[index], formats=FORMATS) as picture:
            picture.load()
            return picture


def load_folder(request: Request) -> DataBundle:
    """Load the image folder `request.path`.

    Raises:
        UsageError: the folder does not exist, holds no image that can be opened, or too few for a test split.
    """
    if request.path is None:
        raise UsageError("no folder given; write folder:PATH with the path of an image folder")
    root = request.path.expanduser()
    if not root.is_dir():
        raise UsageError(f"no folder at {root}; give the path of an image folder that holds CLASS/FILE")
    skipped: list[str] = []
    test_folder = next((name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test_folder is not None:
        listed = list_images(root, "train/"), list_images(root, f"{test_folder}/")
        parts = (
            openable(root, listed[0], request.train_limit, request.seed, skipped),
            openable(root, listed[1], request.test_limit, request.seed, skipped),
        )
        how = f"splits train/ and {test_folder}/"
    else:
        good = openable(root, list_images(root, loose=True), None, request.seed, skipped)
        train, test = split_files(good, request.seed)
        parts = (
            [train[i] for i in choose(len(train), request.train_limit, request.seed)],
            [test[i] for i in choose(len(test), request.test_limit, request.seed)],
        )
        listed = train, test
        how = f"split with seed {request.seed}, {len(test)} of {len(good)} images for test"
    classes = sorted({_class_of(file) for part in listed for file in part})
    sets = [_image_set(root, part, classes, request.size) for part in parts]
    labelled = classes != [UNLABELLED]
    content = f"{len(classes)} classes" if labelled else "no labels"
    provenance = f"image folder {root.resolve().name}/ ({content}; {how})"
    return DataBundle(sets[0], sets[1], classes, f"folder:{request.path}", provenance, skipped, labelled)


def list_images(root: Path, part: str = "", *, loose: bool = False) -> list[str]:
    """Return the sorted names, relative to `root`, of the image files in the class folders of `root`/`part`.

    Args:
        root: the folder.
        part: "" or the name of a split's folder with a slash at its end.
        loose: where no class folder holds an image, take those that lie in `root` itself.

    Raises:
        UsageError: there is no image file.
    """
    folders = sorted(f for f in (root / part).iterdir() if f.is_dir() and not f.name.startswith("."))
    files = [
        f"{part}{folder.name}/{file.name}"
        for folder in folders
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    ]
    if not files and loose:
        files = sorted(f.name for f in root.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    if not files:
        raise UsageError(
            f"no image found in {root / part}; lay the files out as CLASS/FILE (or train/CLASS/FILE and val/CLASS/FILE)"
        )
    return files


def find_pictures(root: Path) -> list[str]:
    """Return the sorted names, relative to `root`, of the image files in `root` and all folders below it.

    Raises:
        UsageError: there is no image file.
    """
    files = sorted(
        str(file.relative_to(root))
        for file in root.rglob("*")
        if file.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    if not files:
        raise UsageError(f"no image found in {root}; give a folder that holds pictures ({', '.join(sorted(SUFFIXES))})")
    return files


def split_files(files: list[str], seed: int) -> tuple[list[str], list[str]]:
    """Split names "CLASS/FILE" into about 80 % train and 20 % test, determined by `seed`; both lists are sorted.

    Every class of two or more images has some in both. If no class has two, classes are ignored.

    Raises:
        UsageError: fewer than two images.
    """
    if len(files) < 2:
        raise UsageError(f"{len(files)} usable image in the folder cannot make a train and a test set; add images")
    rng = np.random.default_rng(seed)
    groups: dict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[_class_of(file)].append(file)
    pools = [group for group in groups.values() if len(group) > 1] or [files]
    test: set[str] = set()
    for pool in pools:
        held_out = max(1, round(TEST_SHARE * len(pool)))
        test.update(pool[i] for i in rng.permutation(len(pool))[:held_out])
    return sorted(set(files) - test), sorted(test)


def openable(root: Path, files: list[str], limit: int | None, seed: int, skipped: list[str]) -> list[str]:
    """Return the files that can be opened, at most `limit`, in a random choice like that of `choose`.

    Args:
        root: the folder.
        files: names relative to `root`.
        limit: largest number of files to return, None for all.
        seed: of the choice.
        skipped: receives "FILE: REASON" for each file that cannot be opened.

    Raises:
        UsageError: none of the files can be opened.
    """
    order = np.arange(len(files)) if limit is None else np.random.default_rng(seed).permutation(len(files))
    good: list[str] = []
    for index in order:
        if limit is not None and len(good) >= limit:
            break
        reason = _damage(root / files[index])
        if reason is None:
            good.append(files[index])
        else:
            skipped.append(f"{printable(files[index])}: {reason}")
    if not good:
        raise UsageError(f"none of the {len(files)} image files in {root} can be opened; replace them")
    return sorted(good)


def printable(name: str) -> str:
    """A file's name for tables and messages: bytes that are no UTF-8 as backslash and number."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _damage(file: Path) -> str | None:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a FIFO would wait for a writer
            return "no regular file"
        with Image.open(file, formats=FORMATS) as picture:
            picture.verify()
    except DECODE_ERRORS as error:
        # Pillow's message contains the absolute path, which must not appear in a results file.
        return type(error).__name__
    return None


def _class_of(file: str) -> str:
    return file.split("/")[-2] if "/" in file else UNLABELLED


def _image_set(root: Path, files: list[str], classes: list[str], size: int) -> ImageSet:
    number = {name: label for label, name in enumerate(classes)}
    return ImageSet(
        FileImages(root, files), [number[_class_of(f)] for f in files], list(map(printable, files)), classes, size
    )
