"""Labels of defences, settings and threat models as words for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmjp.defenses.chain import JOINT


def defence_words(label: str) -> str:
    """A defence's label in words: "mjp:gamma=0.1,dal=none" is "mjp, gamma 0.1, dal none"; chains have " + "."""
    parts = (part.partition(":") for part in JOINT.split(str(label)))
    return " + ".join(
        ", ".join([name, *(setting.strip().replace("=", " ", 1) for setting in settings.split(",") if setting)])
        for name, _, settings in parts
    )


def setting_words(settings: Mapping[str, Any]) -> str:
    """Settings in words: {"steps": 60, "prior": {"strength": 40.0}} is "steps 60, prior (strength 40)"."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items())


def grant_words(grants: Any) -> str:
    """What an adversary is granted, in words: ["model_weights", "labels"] is "model weights, labels"."""
    return ", ".join(str(grant).replace("_", " ") for grant in grants)


def number_of(count: int, noun: str) -> str:
    """A count with its noun: "1 image", "2 images"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({setting_words(value)})"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
