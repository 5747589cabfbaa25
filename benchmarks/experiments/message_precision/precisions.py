"""What becomes of an update on its way: rounded, quantised, sparsified, returned as weights, with weight decay.

torch is imported where a number is computed, so that the options can name the precisions without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from attacks.observation import Observation

if TYPE_CHECKING:
    from torch import Tensor


def float16(gradient: Tensor) -> Tensor:
    """Rounded to float16."""
    return gradient.half().float()


def bfloat16(gradient: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return gradient.bfloat16().float()


def int8(gradient: Tensor) -> Tensor:
    """Symmetric, the largest entry of the tensor at 127."""
    return _quantised(gradient.reshape(1, -1)).reshape(gradient.shape)


def int8_channel(gradient: Tensor) -> Tensor:
    """Symmetric, the largest entry of each row (of a matrix, of a filter, of a table) at 127."""
    rows = gradient.flatten(1) if gradient.dim() in (2, 4) else gradient.reshape(-1, gradient.shape[-1])
    return _quantised(rows).reshape(gradient.shape)


def largest(share: float) -> Callable[[Tensor], Tensor]:
    """The largest entries of each tensor, this share of them; the others are zero."""

    def kept(gradient: Tensor) -> Tensor:
        import torch

        sizes = gradient.abs().flatten()
        least = sizes.kthvalue(len(sizes) - max(1, round(share * len(sizes))) + 1).values
        return torch.where(gradient.abs() >= least, gradient, torch.zeros_like(gradient))

    return kept


def _quantised(rows: Tensor) -> Tensor:
    step = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (rows / step).round() * step


PRECISIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "float32": lambda gradient: gradient,
    "float16": float16,
    "bfloat16": bfloat16,
    "int8 per channel": int8_channel,
    "int8 per tensor": int8,
    "largest 30 %": largest(0.3),
    "largest 10 %": largest(0.1),
    "returned weights": None,
    "weight decay": None,
}


def send(view: Observation, precision: str, *, rate: float, decay: float) -> Observation:
    """The update as it arrives.

    Args:
        view: the float32 gradient.
        precision: of `PRECISIONS`.
        rate: learning rate of a client that returns its weights, which the server subtracts from those that it sent.
        decay: weight decay of a client that adds it to the gradient.
    """
    change = PRECISIONS[precision]
    if change is not None:
        return replace(view, gradients={name: change(gradient) for name, gradient in view.gradients.items()})
    weights = {name: parameter.detach() for name, parameter in view.model.named_parameters()}
    if precision == "weight decay":
        return replace(view, gradients={n: g + decay * weights[n] for n, g in view.gradients.items()})
    returned = {n: weights[n] - rate * g for n, g in view.gradients.items()}
    differences = {n: (weights[n] - after) / rate for n, after in returned.items()}
    return replace(view, gradients=differences, kind="weights", learning_rate=rate)
