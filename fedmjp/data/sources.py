"""Load any data set by name: `load_data(name, size=...)`."""

from __future__ import annotations

from pathlib import Path

from attacks.registry import UsageError
from fedmjp.data.catalog import SOURCES, DataBundle, Request, split_source


def load_data(
    name: str,
    *,
    size: int,
    path: str | Path | None = None,
    train_limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
) -> DataBundle:
    """Load the data set called `name`; pixels are decoded only on demand.

    Args:
        name: an entry of `SOURCES`; "folder:PATH" for an image folder, and so on.
        size: side of the images in pixels, at least 1.
        path: a local copy: a folder of parquet files in the hub's layout, or for "imagenet" also an image folder.
        train_limit: largest number of images in the train set, at least 1; a random subset determined by `seed`. None
            takes all.
        test_limit: the same for the test set.
        seed: determines the subsets and, for a folder without splits, the split; at least 0.

    Raises:
        UsageError: an unknown name, a number out of range, or data that is missing or cannot be read or downloaded.
    """
    for option, value, least in (
        ("size", size, 1),
        ("train_limit", train_limit, 1),
        ("test_limit", test_limit, 1),
        ("seed", seed, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{option} is {value}; give at least {least}")
    source, folder = split_source(name)
    if folder is not None and path is not None:
        raise UsageError(f"{name!r} names its folder already; drop --data-path")
    path = folder or path
    return SOURCES.get(source)(Request(size, None if path is None else Path(path), train_limit, test_limit, seed))
