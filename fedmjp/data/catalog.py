"""Interface of the data sources: what a source receives and returns, and the registry of sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attacks.registry import Registry
from fedmjp.data.imageset import ImageSet


@dataclass(frozen=True)
class DataBundle:
    """A loaded data set.

    Attributes:
        train, test: disjoint image sets over the same classes.
        classes: class names in label order.
        name: the name under which it was loaded.
        provenance: one line on the origin of the images, to be given with any number measured on them.
        skipped: images left out because they cannot be opened, each "ID: REASON".
    """

    train: ImageSet
    test: ImageSet
    classes: list[str]
    name: str
    provenance: str
    skipped: list[str] = field(default_factory=list)


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


SOURCES: Registry[Callable[[Request], DataBundle]] = Registry("data set")
