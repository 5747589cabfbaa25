"""A prepared classifier that is changed less than it could be, for clients that look at what they are sent.

Of strength s in (0, 1) the rows of the other classes keep 1 - s of their weights, and the target's bias lies
ln(1 / (1 - s)) logits below the others: p_t, the share that other images send through the target's row, is then of the
order of what they send through their own rows. An image comes back with an error of about that share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attacks.active.head import SetHead
from attacks.observation import Observation
from attacks.registry import UsageError

DIGITS = 1e-3  # logits by which a bias in float32 may miss its margin


def margin(strength: float) -> float:
    """How far below the others' biases the target's lies, in logits."""
    return -math.log1p(-strength)


def softened(
    model: nn.Module, whole: Mapping[str, Tensor], bias: str, target: int, strength: float
) -> dict[str, Tensor]:
    """Parameters on the way from those of `model` to those of a server of strength 1.

    Args:
        whole: the latter, by name.
        bias: name of the classifier's bias, of which the target's entry alone is changed, by `margin`.
        target: its class.
        strength: the share of the way, in (0, 1).
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = {name: torch.lerp(parameters[name], value, strength) for name, value in whole.items()}
    found[bias] = parameters[bias].clone()
    others = torch.cat([found[bias][:target], found[bias][target + 1 :]])
    found[bias][target] = others.min() - margin(strength)
    return found


def softened_head(observation: Observation, layer: str, target: int, strength: float) -> SetHead:
    """The classifier as a client was sent it at this strength.

    Raises:
        UsageError: its biases are others.
    """
    head = observation.model.get_submodule(layer)
    found = SetHead(layer, target, head.weight[target].detach().double(), head.bias.detach().double())
    below = float(found.others(found.bias).min() - found.bias[target])
    if abs(below - margin(strength)) > DIGITS:
        raise UsageError(f"the model that the client was sent was not prepared for class {target} at this strength")
    return found
