"""The linear layer that turns a model's representation into logits, for defences that act in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from attacks.registry import UsageError


def classifier_name(module: nn.Module, asking: str) -> str:
    """Name of the classifier of a timm model, a linear layer.

    Args:
        module: the model.
        asking: who needs it, for the message.

    Raises:
        UsageError: the model has none (an objective that does not classify removes it).
    """
    found = module.get_classifier() if hasattr(module, "get_classifier") else None
    name = next((name for name, layer in module.named_modules() if layer is found), "")
    if not isinstance(found, nn.Linear):
        raise UsageError(f"{asking} acts in front of a linear classifier, and this model has none: train it supervised")
    return name


@contextmanager
def recorded_calls(layer: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Context in which every call of a layer is recorded as (input, output), both with their graph."""
    calls: list[tuple[Tensor, Tensor]] = []
    hook = layer.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    try:
        yield calls
    finally:
        hook.remove()
