"""Central training: the clients' model, data, objective and defence, with the recipe that the papers train by."""

from fedmjp.training.config import Recipe, TrainConfig
from fedmjp.training.run import train

__all__ = ["Recipe", "TrainConfig", "train"]
