"""Central training: the clients' model, data, objective and defence, with the recipe that the papers train by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from fedmjp.training.config import Recipe, TrainConfig

if TYPE_CHECKING:
    from fedmjp.training.run import train

__all__ = ["Recipe", "TrainConfig", "train"]

__getattr__ = lazy_exports(__name__, {"fedmjp.training.run": ("train",)})
