"""Defences by name, without importing torch: command lines are made from their options.

A new built-in defence is one file and one line in `DEFENSES`; another package adds its own through the entry points
`fedmjp.defenses`; a class defined in a notebook takes the decorator `@DEFENSES.register("name")`.
"""

from __future__ import annotations

from attacks.registry import Registry
from fedmjp.defenses.base import ClientInput, Defense

__all__ = ["DEFENSES", "ClientInput", "Defense"]

DEFENSES: Registry[type[Defense]] = Registry(
    "defense",
    {
        "none": "fedmjp.defenses.base:Defense",
        "adapters": "fedmjp.defenses.adapters:Adapters",
        "ats": "fedmjp.defenses.ats:TransformationPolicy",
        "dp_sgd": "fedmjp.defenses.dp_sgd:DPSGD",
        "frozen_positions": "fedmjp.defenses.frozen_positions:FrozenPositions",
        "lora": "fedmjp.defenses.lora:LowRankAdaptation",
        "mjp": "fedmjp.defenses.mjp:MaskedJigsawPuzzle",
        "noise": "fedmjp.defenses.noise:ClippedNoise",
        "precode": "fedmjp.defenses.precode:Precode",
        "quantise": "fedmjp.defenses.quantise:Quantise",
        "soteria": "fedmjp.defenses.soteria:Soteria",
        "spp": "fedmjp.defenses.spp:ShuffledPatchesAndPixels",
        "topk": "fedmjp.defenses.topk:TopK",
        "withheld": "fedmjp.defenses.withheld:Withheld",
    },
    group="fedmjp.defenses",
    base="fedmjp.defenses.base:Defense",
)
