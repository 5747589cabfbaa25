"""Recipes of clients by name: augmentation, dropout, batches, optimisers, local steps, and the server's optimiser.

A recipe is what differs from `PLAIN`: one image a step as it is, whose gradient is sent and averaged.
"""

from __future__ import annotations

from typing import Any

from attacks import UsageError
from fedmjp.config import RunConfig, from_flat
from fedmjp.federation_options import FederationConfig, LocalConfig

PLAIN = "one image"
ADAMW = {"optimizer": "adamw", "weight_decay": 0.05, "learning_rate": 1e-3}
WEIGHTS = {"update": "weights"}
# Name -> options of `fedmjp.simulate`.
RECIPES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "flip": {"augment": "flip"},
    "crop+flip": {"augment": "crop+flip"},
    "colour": {"augment": "colour"},
    "drop path 0.1": {"drop_path": 0.1},
    "dropout 0.1": {"dropout": 0.1},
    "batch of 2": {"batch_size": 2},
    "Mixup in batches of 2": {"batch_size": 2, "augment": "mixup"},
    "CutMix in batches of 2": {"batch_size": 2, "augment": "cutmix"},
    "DeiT augmentation in batches of 2": {"batch_size": 2, "augment": "deit"},
    "batch of 8": {"batch_size": 8},
    "batch of 32": {"batch_size": 32},
    "weights after one step": WEIGHTS,
    "momentum 0.9": WEIGHTS | {"momentum": 0.9},
    "weight decay 0.05": WEIGHTS | {"weight_decay": 0.05},
    "AdamW": WEIGHTS | ADAMW,
    "2 local steps": WEIGHTS | {"local_steps": 2},
    "2 local epochs": WEIGHTS | {"local_epochs": 2},
    "FedAvgM": {"strategy": "fedavgm"},
    "FedAdam": {"strategy": "fedadam:eta=0.001"},
    "FedProx in 2 local steps": WEIGHTS | {"local_steps": 2, "strategy": "fedprox"},
    "common": WEIGHTS | ADAMW | {"batch_size": 32, "augment": "crop+flip", "local_epochs": 2},
}


def check_recipes(names: tuple[str, ...]) -> None:
    """Raise `UsageError` for a name that is not one of `RECIPES`."""
    for name in names:
        if name not in RECIPES:
            raise UsageError(f"--recipes {name!r} is unknown; choose from: {', '.join(RECIPES)}")


def with_recipe(config: RunConfig, name: str) -> RunConfig:
    """A configuration whose clients train by this recipe and by nothing else that a recipe sets.

    The learning rate stays where the recipe has none of its own.
    """
    return from_flat(_plain() | RECIPES[name], config)


def recipe_of(config: RunConfig) -> str:
    """Name of the recipe that the clients of a configuration train by.

    Raises:
        UsageError: no recipe has these settings.
    """
    for name in RECIPES:
        if with_recipe(config, name) == config:
            return name
    raise UsageError(f"no recipe has the settings of {config.local} and {config.federation}")


def _plain() -> dict[str, Any]:
    """The defaults of all options that recipes set, the learning rate excepted."""
    defaults = vars(FederationConfig()) | vars(LocalConfig())
    changed = {option for options in RECIPES.values() for option in options} - {"learning_rate"}
    return {option: defaults[option] for option in sorted(changed)}
