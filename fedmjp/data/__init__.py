"""Data: image sets by name, decoded on demand, and their division among clients."""

from fedmjp.data.catalog import SOURCES, DataBundle
from fedmjp.data.imageset import ImageSet
from fedmjp.data.partition import partition
from fedmjp.data.sources import load_data

__all__ = ["SOURCES", "DataBundle", "ImageSet", "load_data", "partition"]
