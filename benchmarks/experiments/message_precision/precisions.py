"""What becomes of an update on its way: rounded, quantised, sparsified, returned as weights, with weight decay.

What a client does to its update is a defence (`fedmjp.defenses`: quantise, topk); each message is an entry of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attacks.observation import Observation
from experiments.message_precision.options import DECAYED, FEEDBACK, PRECISIONS, RETURNED
from fedmjp.defenses.chain import read_defense


def send(history: Sequence[Observation], precision: str, *, rate: float, decay: float, seed: int) -> list[Observation]:
    """A client's updates as they arrive, oldest first.

    Args:
        history: the float32 gradients.
        precision: of `PRECISIONS`.
        rate: learning rate of a client that returns its weights, which the server subtracts from those that it sent.
        decay: weight decay of a client that adds it to the gradient.
        seed: of random roundings and masks, a number an update.
    """
    if precision in (RETURNED, DECAYED):
        return [_returned(view, rate) if precision == RETURNED else _decayed(view, decay) for view in history]
    defense, memory, sent = read_defense(PRECISIONS[precision]), {}, []
    for number, view in enumerate(history):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        gradients, memory = defense.message(dict(view.gradients), generator, memory)
        sent.append(replace(view, gradients=gradients))
    return sent


def is_sparse(precision: str) -> bool:
    """Whether a message leaves entries out."""
    return PRECISIONS[precision].startswith("topk")


def has_memory(precision: str) -> bool:
    """Whether a message holds what earlier ones left out."""
    return precision.endswith(FEEDBACK)


def _decayed(view: Observation, decay: float) -> Observation:
    weights = {name: parameter.detach() for name, parameter in view.model.named_parameters()}
    return replace(view, gradients={n: g + decay * weights[n] for n, g in view.gradients.items()})


def _returned(view: Observation, rate: float) -> Observation:
    weights = {name: parameter.detach() for name, parameter in view.model.named_parameters()}
    returned = {n: weights[n] - rate * g for n, g in view.gradients.items()}
    differences = {n: (weights[n] - after) / rate for n, after in returned.items()}
    return replace(view, gradients=differences, kind="weights", learning_rate=rate)
