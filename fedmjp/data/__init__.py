"""Data: image sets by name, decoded on demand, and their division among clients.

The names are known without importing torch; what loads images is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from fedmjp.data.catalog import SOURCES, DataBundle

if TYPE_CHECKING:
    from fedmjp.data.gallery import Gallery, load_gallery
    from fedmjp.data.imageset import ImageSet
    from fedmjp.data.partitioning import partition
    from fedmjp.data.sources import load_data

__all__ = ["SOURCES", "DataBundle", "Gallery", "ImageSet", "load_data", "load_gallery", "partition"]

__getattr__ = lazy_exports(
    __name__,
    {
        "fedmjp.data.gallery": ("Gallery", "load_gallery"),
        "fedmjp.data.imageset": ("ImageSet",),
        "fedmjp.data.partitioning": ("partition",),
        "fedmjp.data.sources": ("load_data",),
    },
)
