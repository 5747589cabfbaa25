"""Vision Transformers by name, with and without the MJP input layer.

The names are known without importing torch; what builds models is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from fedmjp.models.registry import MODELS, model_names, split_name

if TYPE_CHECKING:
    from fedmjp.models.build import BuiltModel, build_model, resize_model
    from fedmjp.models.vit import POSITION_TABLES, AprilBlock, ViT

__all__ = [
    "MODELS",
    "POSITION_TABLES",
    "AprilBlock",
    "BuiltModel",
    "ViT",
    "build_model",
    "model_names",
    "resize_model",
    "split_name",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "fedmjp.models.build": ("BuiltModel", "build_model", "resize_model"),
        "fedmjp.models.vit": ("POSITION_TABLES", "AprilBlock", "ViT"),
    },
)
