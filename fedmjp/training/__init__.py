"""Central training with the clients' model, data, objective and defence, and the training recipe of the papers."""

from fedmjp.training.config import Recipe, TrainConfig
from fedmjp.training.run import train

__all__ = ["Recipe", "TrainConfig", "train"]
