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

# What a data set holds. Command lines that attack take images.
IMAGES, LABEL_MAPS, SPEECH = "images with a class each", "images with a class a pixel", "spoken words"


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
        size: side of the images in pixels; spoken words have a length of their own.
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
        "photos-in-order": "fedmjp.data.photos:load_photos_in_order",
        "folder:PATH": "fedmjp.data.folder:load_folder",
        "cifar10": "fedmjp.data.hub:CIFAR10",
        "cifar100": "fedmjp.data.hub:CIFAR100",
        "tiny-imagenet": "fedmjp.data.hub:TINY_IMAGENET",
        "imagenet": "fedmjp.data.hub:IMAGENET",
        "masks:PATH": "fedmjp.data.masks:load_masks",
        "mosaics": "fedmjp.data.mosaics:load_mosaics",
        "speech:PATH": "fedmjp.data.speech:load_speech",
        "spoken": "fedmjp.data.spoken:load_spoken",
    },
)


# Of all others: IMAGES.
KINDS = {"masks:PATH": LABEL_MAPS, "mosaics": LABEL_MAPS, "speech:PATH": SPEECH, "spoken": SPEECH}


def split_source(name: str) -> tuple[str, str | None]:
    """(entry of `SOURCES`, folder) that --data `name` stands for; the folder is None but for "folder:PATH" and so on.

    Raises:
        UsageError: unknown name, or no folder after the colon.
    """
    kind, colon, folder = name.partition(":")
    entry = f"{kind}:PATH"
    if not colon or entry not in SOURCES:
        SOURCES.check(name)
        return name, None
    if not folder:
        raise UsageError(f"no folder given; write {entry} with the path of a folder")
    return entry, folder


def require_kind(name: str, kind: str, user: str) -> None:
    """Refuse a data set that holds something else than `kind`.

    Args:
        name: as --data takes it.
        kind: `IMAGES` or another kind.
        user: what needs that kind, to begin the message with.

    Raises:
        UsageError: unknown name, or another kind; the message lists the data sets of that kind.
    """
    found = KINDS.get(split_source(name)[0], IMAGES)
    if found != kind:
        fitting = ", ".join(entry for entry in SOURCES if KINDS.get(entry, IMAGES) == kind)
        raise UsageError(f"{user} needs {kind}, and data set {name!r} holds {found}; choose from: {fitting}")
