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

from attacks.identities import classifier_sums
from attacks.observation import Observation

# Units of round-off, of the largest sum, below which a difference of two sums counts as none.
ROUND_OFF_UNITS = 16.0
# The same in standard deviations of what noise in the message leaves in a difference. An input of unit variance whose
# share is as large as that comes back with errors of a quarter of it.
NOISE_UNITS = 4.0


@dataclass(frozen=True)
class Bins:
    """The bins that hold inputs.

    Attributes:
        places: (n,) int64, of the row whose threshold is the lower one.
        inputs: (n, M) float64, the input of each, or its inputs' weighted mean.
        shares: (n,) float64, the sum of c.
        deviation: standard deviation of the noise in a share, and in each entry of shares times inputs.
    """

    places: Tensor
    inputs: Tensor
    shares: Tensor
    deviation: float = 0.0

    @property
    def is_noisy(self) -> bool:
        """Whether the message holds noise that hides small shares."""
        return self.deviation > 0

    def where(self, kept: Tensor) -> Bins:
        """Those of them for which `kept` (n,) is true."""
        return Bins(self.places[kept], self.inputs[kept], self.shares[kept], self.deviation)


def read_bins(weight: Tensor, bias: Tensor, least: float, noise: float = 0.0) -> Bins:
    """The bins that hold inputs.

    Args:
        weight: (G, K, M) gradients of the rows, in G groups with thresholds that rise.
        bias: (G, K).
        least: a share of this size or below is round-off (`round_off`).
        noise: standard deviation of noise in every entry of the message, at most: no bin shows less, and where a bin
            does, it is what that bin shows.
    """
    weight, bias = weight.double(), bias.double()
    between = weight[:, :-1] - weight[:, 1:]
    content = torch.cat([between, weight[:, -1:]], dim=1).flatten(0, 1)
    shares = torch.cat([bias[:, :-1] - bias[:, 1:], bias[:, -1:]], dim=1).flatten()
    deviation = min(2**0.5 * noise, float(between.square().mean(dim=2).sqrt().min())) if noise else 0.0
    held = (shares.abs() > max(least, NOISE_UNITS * deviation)).nonzero()[:, 0]
    return Bins(held, content[held] / shares[held, None], shares[held], deviation)


def message_noise(observation: Observation) -> float:
    """Standard deviation of noise in every entry of the message that would explain the classifier's gradient, whose
    sums over the classes vanish without; 0 where the update does not hold it.

    What else breaks these sums (low precision, another loss) may pass for noise: an upper bound.
    """
    sums = classifier_sums(observation)
    return sums.noise() if sums is not None and sums.is_broken() else 0.0


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
