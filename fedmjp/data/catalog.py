"""What a data source answers, what it is asked, and the table the sources file themselves in."""

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
        name: the name it was asked for by.
        provenance: one line on where the pixels come from, to stand beside any number measured on them.
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
    """What `load_data` asks of a source: side in pixels, place on disk, most images a split, seed of the choice."""

    size: int
    path: Path | None
    train_limit: int | None
    test_limit: int | None
    seed: int


SOURCES: Registry[Callable[[Request], DataBundle]] = Registry("data set")
