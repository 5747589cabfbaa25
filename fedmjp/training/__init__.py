"""Central training with the clients' model, data, objective and defence, and the training recipe of the papers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from fedmjp.training.config import Recipe, TrainConfig

if TYPE_CHECKING:
    from fedmjp.training.run import train

__all__ = ["Recipe", "TrainConfig", "train"]

__getattr__ = lazy_exports(__name__, {"fedmjp.training.run": ("train",)})
