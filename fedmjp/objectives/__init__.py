"""What clients train, by name: the supervised loss, and position prediction as pre-training.

A new objective is one file and one line in `OBJECTIVES`; another package adds its own through the entry points
`fedmjp.objectives`. On command lines an objective is NAME or NAME:option=value,option=value. Nothing here imports
torch before it computes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from attacks.lazy import lazy_exports
from attacks.registry import Registry
from fedmjp.objectives.base import Objective, TrainingBatch
from fedmjp.settings import split_entry, with_settings, write_value

if TYPE_CHECKING:
    from fedmjp.objectives.learner import Draws, Learner, client_loss
    from fedmjp.objectives.terms import TERMS

__all__ = [
    "OBJECTIVES",
    "TERMS",
    "Draws",
    "Learner",
    "Objective",
    "TrainingBatch",
    "client_loss",
    "objective_help",
    "read_objective",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "fedmjp.objectives.learner": ("Draws", "Learner", "client_loss"),
        "fedmjp.objectives.terms": ("TERMS",),
    },
)

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    {
        "supervised": "fedmjp.objectives.supervised:Supervised",
        "mp3": "fedmjp.objectives.mp3:MP3",
        "droppos": "fedmjp.objectives.droppos:DropPos",
        "mst": "fedmjp.objectives.mst:MST",
        "segmentation": "fedmjp.objectives.segmentation:Segmentation",
    },
    group="fedmjp.objectives",
    base="fedmjp.objectives.base:Objective",
)


def read_objective(entry: str) -> Objective:
    """The objective of an entry "name" or "name:option=value,option=value", its options checked.

    Raises:
        UsageError: no such objective, one of another package that cannot be imported, a setting that does not fit.
    """
    name, settings = split_entry(entry, "--objective")
    objective = with_settings(OBJECTIVES.get(name)(), settings, f"objective {name!r}")
    objective.validate()
    return objective


def objective_help() -> str:
    """The help of --objective: the choices with their options and defaults."""
    choices = []
    for name, kind in OBJECTIVES.available().items():
        options = ", ".join(f"{option.name}={write_value(option.default)}" for option in fields(kind))
        choices.append(f"{name} ({options})" if options else name)
    return f"What is trained: NAME or NAME:option=value,option=value. Choose from: {'; '.join(choices)}."
