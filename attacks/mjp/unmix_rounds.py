"""The whole image from several updates of a client, including the patches that every mask hides.

`attacks.mjp.rounds` adds up the equations of the updates of an image. Block-wise masks hide the middle most: at gamma
0.9 each of 80 updates hides the same 41 to 62 of 196 patches, and along the span of those every patch stays open. That
is the situation of `unmix` with a single update, with fewer patches to separate than one update hides: the last
update's first MLP determines the coefficients along the open directions, and the pieces are placed where no update
shows a patch.

Masked positions share one embedding and attention does not depend on order, so for the tokens it does not matter where
jigsawing has moved a masked patch, only which patches are masked. The patches that the last update masks are those at
the places it masks: known ones, and unseen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from attacks.mjp.joined_updates import obstacle_to_joining
from attacks.mjp.unmix import Unmix
from attacks.observation import Capability, Observation


@dataclass(frozen=True, kw_only=True)
class UnmixRounds(Unmix):
    """Whole image of the last update, from all updates that show it and the last one's first block."""

    needs: ClassVar[frozenset[Capability]] = Unmix.needs | {Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS}
    reads_spans: ClassVar[bool] = False

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        return super().obstacle(observations) or obstacle_to_joining(observations, "unmix")

    def updates(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Those of a client's updates that the attack uses: all."""
        return observations
