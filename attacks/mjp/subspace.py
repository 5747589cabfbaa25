"""Inversion of one update that hides some positions (Masked Jigsaw Puzzle), by an adversary that knows the defence.

The mask is read from the rows that are exactly zero and the localisation loss is computed and removed
(`attacks.linear.position_rows`); `attacks.linear.masked_update` gives all patches up to a known subspace, with the size
of the error along it. A prior settles that, over visible and masked patches together. Masked patches are reconstructed
as what prior and neighbours choose within the span of what was hidden: roughly, and with a confidence that shows it.

What it reaches at which gamma: benchmarks/mjp_adaptive.py; how well its confidence agrees with the truth:
benchmarks/calibration.py.

Without a mask it is `patch_embedding` where the position rows tell all patches apart, and else vouches for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from attacks.base import Attack
from attacks.linear.completion import complete, render, sure_patches
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.masked_update import MaskedUpdate, solve_masked
from attacks.linear.position_rows import read_position_rows, unseen_noise
from attacks.mjp.joined_updates import nothing_masked
from attacks.mjp.rounded import correct_rounded, seconds_of_correction
from attacks.observation import Capability, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class MJPSubspace(Attack):
    """Whole image from one update with masked positions.

    Args:
        prior: settles the directions that the update hides.
        intervals: where the message has fewer digits than float32, solve with the error of every entry
            (`attacks.mjp.rounded`).
    """

    prior: VectorialVariation = field(default_factory=VectorialVariation)
    intervals: bool = True

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        return nothing_masked(observations[-1])

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`."""
        exact = super().estimated_seconds(observations)
        return exact + (seconds_of_correction(observations[-1:]) if self.intervals else 0.0)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds what `details_of` lists."""
        observation = observations[-1]
        rows = read_position_rows(observation)
        update = solve_masked(rows)
        estimate = update.estimate()
        found = complete(self.prior, estimate, rows.tokenizer, observation.std, ~update.masked, updates=1)
        settling = observations[-1:], rows.tokenizer, estimate, found, update.deviation
        sure = sure_patches(*settling, settled=update.dropped, noisy=rows.noisy)
        diagnosis = "; ".join([*update.reasons, *unseen_noise(rows.noisy)])
        details = details_of(update, sure)
        patches = correct_rounded(observations[-1:], found.patches, self.prior)[0] if self.intervals else found.patches
        return render(observation, rows.tokenizer, patches, sure, diagnosis, details)


def details_of(update: MaskedUpdate, vouched: Tensor) -> dict[str, float]:
    """Masked patches, rank of their span, condition of the visible rows, lambda found, share of patches vouched for."""
    return {
        "masked": int(update.masked.sum()),
        "rank": update.rank,
        "condition": update.condition,
        "dal_weight": update.dal_weight,
        "vouched": float(vouched.double().mean()),
    }
