"""Data sets by name, and what their loaders take and return; imports no torch.

A new data set is one line in `SOURCES` that names its loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attacks.registry import Registry, UsageError

if TYPE_CHECKING:
    from fedmjp.data.imageset import ImageSet

FOLDER = "folder:"


@dataclass(frozen=True)
class DataBundle:
    """A loaded data set.

    Attributes:
        train, test: disjoint image sets over the same classes.
        classes: class names in label order.
        name: the name under which it was loaded.
        provenance: one line on the origin of the images, to be given with any number measured on them.
        skipped: images left out because they cannot be opened, each "ID: REASON".
        labelled: whether the labels mean anything; without, all images stand under one class.
    """

    train: ImageSet
    test: ImageSet
    classes: list[str]
    name: str
    provenance: str
    skipped: list[str] = field(default_factory=list)
    labelled: bool = True

    def require_labels(self, reader: str) -> None:
        """Check that there are labels.

        Args:
            reader: what reads them, for the message.

        Raises:
            UsageError: the images have none.
        """
        if not self.labelled:
            raise UsageError(f"{self.name} has no labels, which {reader} needs; lay the files out as CLASS/FILE")


@dataclass(frozen=True)
class Request:
    """Arguments that `load_data` passes to a source.

    Attributes:
        size: side of the images in pixels.
        path: a local copy, or None.
        train_limit, test_limit: largest number of images in a split; None for all.
        seed: of the random choice of images.
    """

    size: int
    path: Path | None
    train_limit: int | None
    test_limit: int | None
    seed: int


SOURCES: Registry[Callable[[Request], DataBundle]] = Registry(
    "data set",
    {
        "photos": "fedmjp.data.photos:load_photos",
        "folder:PATH": "fedmjp.data.folder:load_folder",
        "cifar10": "fedmjp.data.hub:CIFAR10",
        "cifar100": "fedmjp.data.hub:CIFAR100",
        "tiny-imagenet": "fedmjp.data.hub:TINY_IMAGENET",
        "imagenet": "fedmjp.data.hub:IMAGENET",
    },
)


def split_source(name: str) -> tuple[str, str | None]:
    """(entry of `SOURCES`, folder) that --data `name` stands for; the folder is None but for "folder:PATH".

    Raises:
        UsageError: unknown name, or no folder after the colon.
    """
    if not name.startswith(FOLDER):
        SOURCES.check(name)
        return name, None
    if not name.removeprefix(FOLDER):
        raise UsageError("no folder given; write folder:PATH with the path of an image folder")
    return "folder:PATH", name.removeprefix(FOLDER)
