"""`mjp_subspace` with a prior learned from public photographs (`attacks.linear.patch_mixture`).

The equations are the same; what they leave open is settled by a mixture on small patches after total variation. The
confidence of a patch is that of total variation alone, on whose deviations it was calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from attacks.linear.image_prior import VectorialVariation
from attacks.linear.patch_mixture import MixturePrior
from attacks.mjp.subspace import MJPSubspace
from attacks.observation import Capability, Observation


@dataclass(frozen=True, kw_only=True)
class MJPMixture(MJPSubspace):
    """Whole image from one update with masked positions, by an adversary with public photographs.

    Args:
        prior: settles the directions that the update hides.
    """

    prior: VectorialVariation = field(default_factory=MixturePrior)

    needs: ClassVar[frozenset[Capability]] = MJPSubspace.needs | {Capability.AUXILIARY_DATA}
    in_suite: ClassVar[bool] = False

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: the mixture takes about three times what total variation takes."""
        return 4 * super().estimated_seconds(observations)
