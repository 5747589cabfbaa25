"""Groups of parameters that a client may leave out of its update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from torch import nn

from attacks import Observation, find_first_attention, find_tokenizer
from fedmjp.models import POSITION_TABLES

# Group -> whether a parameter of this name is in it, for a model and the images' shape.
Names = Callable[[nn.Module, tuple[int, int, int]], Collection[str]]


def _positions(model: nn.Module, shape: tuple[int, int, int]) -> set[str]:
    return {n for n, _ in model.named_parameters() if n in POSITION_TABLES}


def _projection(model: nn.Module, shape: tuple[int, int, int]) -> set[str]:
    tokenizer = find_tokenizer(model, shape)
    return {n for n in (tokenizer.weight, tokenizer.bias) if n}


def _attention(model: nn.Module, shape: tuple[int, int, int]) -> set[str]:
    weights = find_first_attention(model, find_tokenizer(model, shape).width).weights
    return {n for weight in weights for n in (weight, f"{weight.removesuffix('weight')}bias")}


def _first_block(model: nn.Module, shape: tuple[int, int, int]) -> set[str]:
    norm = find_first_attention(model, find_tokenizer(model, shape).width).norm
    block = f"{norm.rpartition('.')[0]}."
    return {n for n, _ in model.named_parameters() if n.startswith(block)}


def _all_but_classifier(model: nn.Module, shape: tuple[int, int, int]) -> set[str]:
    return {n for n, _ in model.named_parameters() if not n.startswith("head.")}


GROUPS: dict[str, Names] = {
    "nothing": lambda model, shape: set(),
    "position embedding": _positions,
    "patch projection": _projection,
    "positions and projection": lambda model, shape: _positions(model, shape) | _projection(model, shape),
    "first query, key, value": _attention,
    "first block": _first_block,
    "positions and first block": lambda model, shape: _positions(model, shape) | _first_block(model, shape),
    "all but the classifier": _all_but_classifier,
}


def without(observation: Observation, group: str) -> Observation:
    """The update without the parameters of a group."""
    gone = GROUPS[group](observation.model, observation.image_shape)
    return replace(observation, gradients={n: g for n, g in observation.gradients.items() if n not in gone})
