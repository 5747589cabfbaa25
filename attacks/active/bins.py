"""Reading what lies between the thresholds of a layer's units, from the gradient of its rows.

Units with the same direction w and thresholds t_1 < t_2 < ... send, for an input x of measure w x,

    dL/dw_k = sum over inputs with w x > t_k of c x,    dL/db_k = sum over the same inputs of c,

c the gradient at the unit's output, the same number for every unit where all units have the same outgoing weights. The
difference of two rows that follow each other holds the inputs between their thresholds, and if there is one, it is the
quotient of the two differences, whatever c is (Fowl et al. 2022, "Robbing the Fed", equations 3 and 4). Of several
inputs the quotient is a mean, weighted by c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.observation import Observation

# Units of round-off, of the largest sum, below which a difference of two sums counts as none.
ROUND_OFF_UNITS = 16.0


@dataclass(frozen=True)
class Bins:
    """The bins that hold inputs.

    Attributes:
        places: (n,) int64, of the row whose threshold is the lower one.
        inputs: (n, M) float64, the input of each, or its inputs' weighted mean.
        shares: (n,) float64, the sum of c.
    """

    places: Tensor
    inputs: Tensor
    shares: Tensor

    def where(self, kept: Tensor) -> Bins:
        """Those of them for which `kept` (n,) is true."""
        return Bins(self.places[kept], self.inputs[kept], self.shares[kept])


def read_bins(weight: Tensor, bias: Tensor, least: float) -> Bins:
    """The bins that hold inputs.

    Args:
        weight: (G, K, M) gradients of the rows, in G groups with thresholds that rise.
        bias: (G, K).
        least: a share of this size or below is round-off (`round_off`).
    """
    weight, bias = weight.double(), bias.double()
    content = torch.cat([weight[:, :-1] - weight[:, 1:], weight[:, -1:]], dim=1).flatten(0, 1)
    shares = torch.cat([bias[:, :-1] - bias[:, 1:], bias[:, -1:]], dim=1).flatten()
    held = (shares.abs() > least).nonzero()[:, 0]
    return Bins(held, content[held] / shares[held, None], shares[held])


def round_off(observation: Observation, name: str) -> float:
    """The error that a difference of two entries of a bias's gradient may have by the message's precision.

    Args:
        name: of the bias.
    """
    gradient = observation.gradient_of(name)
    error = torch.finfo(gradient.dtype).eps * float(gradient.abs().max())
    if observation.kind == "weights" and observation.learning_rate:
        sent = dict(observation.model.named_parameters())[name]
        error += torch.finfo(sent.dtype).eps * float(sent.detach().abs().max()) / observation.learning_rate
    return ROUND_OFF_UNITS * error
