"""Data: image sets by name, decoded on demand, and their partition among clients."""

from fedmjp.data.catalog import SOURCES, DataBundle
from fedmjp.data.gallery import Gallery, load_gallery
from fedmjp.data.imageset import ImageSet
from fedmjp.data.partition import partition
from fedmjp.data.sources import load_data

__all__ = ["SOURCES", "DataBundle", "Gallery", "ImageSet", "load_data", "load_gallery", "partition"]
