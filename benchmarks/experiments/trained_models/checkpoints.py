"""Trained models by name, for the benchmarks that look at what training did: MODEL, or MODEL=FILE."""

from __future__ import annotations

from collections.abc import Sequence

from attacks import UsageError
from fedmjp.data import DataBundle
from fedmjp.models import BuiltModel, build_model, split_name
from fedmjp.models.weights import classes_of, shipped_names


def sources_of(entries: Sequence[str]) -> dict[str, str]:
    """Model -> source of its weights.

    Args:
        entries: MODEL for its shipped checkpoint, or MODEL=FILE; none for every shipped 64-pixel checkpoint.

    Raises:
        UsageError: an unknown model, or one without a checkpoint.
    """
    named = dict(entry.split("=", 1) if "=" in entry else (entry, "auto") for entry in entries)
    named = named or {name: "auto" for name in shipped_names() if name.startswith("vit_mini_64")}
    for name, source in named.items():
        split_name(name)
        if source in ("random", "timm") or (source == "auto" and name not in shipped_names()):
            raise UsageError(f"no trained weights of {name}; write {name}=FILE, or choose from: {shipped_names()}")
    if not named:
        raise UsageError("no checkpoint ships; pass --model MODEL=FILE")
    return named


def load_trained(name: str, source: str, bundle: DataBundle) -> BuiltModel:
    """The model, without its DAL map, in evaluation mode.

    Raises:
        UsageError: weights that are not there, or that tell other classes apart than those of `bundle`.
    """
    if classes_of(name, source) != len(bundle.classes):
        raise UsageError(
            f"the weights of {name} tell {classes_of(name, source)} classes apart, {bundle.name} has "
            f"{len(bundle.classes)}; choose --data or --model to match"
        )
    built = build_model(name, num_classes=len(bundle.classes), weights=source, dal="none")
    built.module.eval()
    return built
