"""What attacks share that sort images into bins by their brightness: how the thresholds are spread.

Without auxiliary data they are spread evenly over [0, 1], where every image's brightness lies. With it they are
quantiles of the normal distribution with the mean and deviation of public photographs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import torch
from torch import Tensor

from attacks.active.base import ActiveAttack
from attacks.observation import Capability, ThreatModel

# Mean and deviation of the brightness, in [0, 1], of the 50,000 training images of CIFAR-10 (a test: of 500 of them).
PUBLIC = NormalDist(0.4733, 0.1249)
# Thresholds below and above all images.
BELOW_ALL, ABOVE_ALL = -0.01, 1.01


@dataclass(frozen=True, kw_only=True)
class BrightnessBins(ActiveAttack):
    """An attack with thresholds of brightness.

    Args:
        calibrated: spread the thresholds as the brightness of public photographs (auxiliary data), not evenly.
    """

    calibrated: bool = False

    def granted(self, threat_model: ThreatModel) -> Self:
        """Calibrated where auxiliary data is granted."""
        return replace(self, calibrated=True) if Capability.AUXILIARY_DATA in threat_model.grants else self

    def used(self) -> frozenset[Capability]:
        """Auxiliary data too, where the thresholds are calibrated."""
        return self.needs | ({Capability.AUXILIARY_DATA} if self.calibrated else frozenset())

    def quantiles(self, shares: Tensor) -> Tensor:
        """Brightnesses below which these shares of all images are expected, (K,) float64.

        Args:
            shares: (K,) in [0, 1]; 0 stands for a brightness below all images, 1 for one above them.
        """
        found = shares.double().clone()
        inner = (shares > 0) & (shares < 1)
        if self.calibrated:
            found[inner] = torch.tensor([PUBLIC.inv_cdf(share) for share in shares[inner].tolist()]).double()
        found[shares <= 0], found[shares >= 1] = BELOW_ALL, ABOVE_ALL
        return found
