"""Images to attack: every picture of a place, with no split into train and test.

A place is "photos" (the embedded crops), the name of a data set (its test images), or a folder of pictures, flat or in
class folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from fedmjp.data.catalog import SOURCES
from fedmjp.data.folder import FileImages, find_pictures, openable
from fedmjp.data.imageset import ImageSet, choose
from fedmjp.data.sources import load_data


@dataclass(frozen=True)
class Gallery:
    """Images to attack.

    Attributes:
        images: the set, over the classes of its source.
        name: for a table's column.
        provenance: one line on where the pixels come from.
        skipped: pictures left out because they cannot be opened, each "ID: REASON".
    """

    images: ImageSet
    name: str
    provenance: str
    skipped: tuple[str, ...] = ()


def load_gallery(
    place: str, *, size: int, limit: int | None = None, path: Path | None = None, seed: int = 0
) -> Gallery:
    """Load the images of `place`; pixels are decoded only when asked for.

    Args:
        place: "photos", a data set's name, or a folder.
        size: side in pixels that the images are brought to.
        limit: most images; a random choice fixed by `seed`, or for "photos" the first ones (best views first).
        path: a data set's local copy.

    Raises:
        UsageError: no such place, or nothing in it that opens.
    """
    if place in SOURCES and place != "folder:PATH":
        bundle = load_data(place, size=size, path=path, seed=seed)
        images = bundle.train if place == "photos" else bundle.test
        kept = range(len(images))[:limit] if place == "photos" else choose(len(images), limit, seed)
        return Gallery(images.subset(kept), place, bundle.provenance, tuple(bundle.skipped))
    root = Path(place).expanduser()
    if not root.is_dir():
        names = ", ".join(name for name in SOURCES if name != "folder:PATH")
        raise UsageError(f"--images {place} is neither a folder nor a data set; choose a folder or from: {names}")
    skipped: list[str] = []
    files = openable(root, find_pictures(root), limit, seed, skipped)
    classes = sorted({str(Path(file).parent) for file in files})
    labels = [classes.index(str(Path(file).parent)) for file in files]
    images = ImageSet(FileImages(root, files), labels, files, classes, size)
    name = f"folder:{root.resolve().name}"
    return Gallery(images, name, f"{len(files)} pictures of the folder {root.resolve().name}/", tuple(skipped))
