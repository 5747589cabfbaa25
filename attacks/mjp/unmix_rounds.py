"""The whole image from several updates of a client, the patches that every mask hides included.

`attacks.mjp.rounds` adds up what the updates say of an image. Block-wise masks hide the middle most: at gamma 0.9 each
of 80 updates hides the same 41 to 62 of 196 patches, and along the span of those every patch stays open. That is the
state of affairs in which `unmix` finds a single update, with fewer patches to separate than one update hides: the last
update's first MLP is asked for the coefficients along the open directions, and the pieces go into the holes that no
update has filled.

Masked positions share one embedding and attention does not care for order, so that it does not matter to the tokens
where jigsawing has put a masked patch, only which patches are masked. The patches that the last update masks are those
at the places it masks: known ones, and unseen ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.mjp.rounds import gather
from attacks.mjp.span_search import Evidence
from attacks.mjp.subspace import settle
from attacks.mjp.unmix import Unmix, refuse_unless_read
from attacks.observation import Capability, Observation
from attacks.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class UnmixRounds(Unmix):
    """Whole image of the last update, from all updates that show it and the last one's first block."""

    needs: ClassVar[frozenset[Capability]] = Unmix.needs | {Capability.SEVERAL_ROUNDS}

    def evidence(
        self, observations: Sequence[Observation], tokenizer: Tokenizer, rows: Tensor
    ) -> tuple[Evidence, Tensor, dict[str, float]]:
        """What all updates say, the prior's guess of all patches (N, P), and numbers for the details.

        Raises:
            UsageError: the last update does not say what it would have to.
        """
        known = gather(observations, tokenizer, rows)
        masked, unseen = known.last.clean.masked, ~known.seen
        refuse_unless_read(known.reasons, masked)
        if known.equations.updates == 1:
            return super().evidence(observations, tokenizer, rows)
        estimate = known.equations.solve()
        settled = settle(self.prior, estimate, tokenizer, observations[-1], known.seen)
        told = {
            "masked": int(masked.sum()),
            "updates": known.equations.updates,
            "never_seen": int(unseen.sum()),
            "open": len(estimate.open),
        }
        rows = estimate.patches(torch.zeros_like(estimate.centre))
        return Evidence(rows, estimate.open, masked, unseen), settled.patches, told
