"""Images to attack, without a split into train and test.

They are loaded from "photos" (the embedded crops), from a data set by name (its test images), or from a folder of
images, flat or with class folders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attacks.registry import UsageError
from fedmjp.data.catalog import IMAGES, KINDS, SOURCES, require_kind
from fedmjp.data.folder import FileImages, find_pictures, openable, printable
from fedmjp.data.imageset import ImageSet, choose
from fedmjp.data.sources import load_data


@dataclass(frozen=True)
class Gallery:
    """Images to attack.

    Attributes:
        images: the image set, with the classes of its source.
        name: for a table's column.
        provenance: one line on the origin of the images.
        skipped: images left out because they cannot be opened, each "ID: REASON".
    """

    images: ImageSet
    name: str
    provenance: str
    skipped: tuple[str, ...] = ()

    def contents(self, size: int) -> Iterator[dict[str, bytes]]:
        """`ImageSet.contents` of the images that can be decoded, by their ids, `size` at a time."""
        for start in range(0, len(self.images), size):
            found: dict[str, bytes] = {}
            for index in range(start, min(start + size, len(self.images))):
                with suppress(UsageError):
                    (found[self.images.ids[index]],) = self.images.contents([index])
            yield found


def load_gallery(
    place: str, *, size: int, limit: int | None = None, path: Path | None = None, seed: int = 0
) -> Gallery:
    """Load the images of `place`; pixels are decoded only on demand.

    Args:
        place: "photos", a data set's name, or the path of a folder.
        size: side in pixels to which the images are resized.
        limit: largest number of images; a random choice determined by `seed`, or for "photos" the first ones (best
            views first).
        path: a local copy of the data set.
        seed: of the random choice.

    Raises:
        UsageError: `place` does not exist, or holds no image that can be opened.
    """
    if place in SOURCES and not place.endswith(":PATH"):
        require_kind(place, IMAGES, "an attack")
        bundle = load_data(place, size=size, path=path, seed=seed)
        images = bundle.train if place == "photos" else bundle.test
        kept = range(len(images))[:limit] if place == "photos" else choose(len(images), limit, seed)
        return Gallery(images.subset(kept), place, bundle.provenance, tuple(bundle.skipped))
    root = Path(place).expanduser()
    if not root.is_dir():
        names = ", ".join(n for n in SOURCES if n not in KINDS and not n.endswith(":PATH"))
        raise UsageError(f"--images {place} is neither a folder nor a data set; choose a folder or from: {names}")
    skipped: list[str] = []
    files = openable(root, find_pictures(root), limit, seed, skipped)
    classes = sorted({str(Path(file).parent) for file in files})
    labels = [classes.index(str(Path(file).parent)) for file in files]
    images = ImageSet(FileImages(root, files), labels, list(map(printable, files)), classes, size)
    name = f"folder:{root.resolve().name}"
    return Gallery(images, name, f"{len(files)} pictures of the folder {root.resolve().name}/", tuple(skipped))
