"""Inversion of several updates of a client that hides positions anew each time (Masked Jigsaw Puzzle).

It assumes that the client's updates show the same pixels, or those mirrored, shifted by whole patches, or with their
channels mixed by one affine map (brightness, contrast and saturation that clip nothing). Crops, resizing, shifts by
other numbers of pixels, hue, clipped or rounded colours leave an update out, and with none left the answer is that of
one update. The answer is the view that the last update shows, not the photograph before augmentation.

Updates whose position gradient is withheld are read by the spans of their first attention (`attacks.mjp.span_update`),
with the weights that were sent; both kinds are added up together.

With more patches than channels an update shows its hidden span in part; three and more of unmoved images show the rest
(`attacks.linear.completed_spans`).

Each update that shows the target's image adds its equations (`attacks.mjp.joined_updates`): what one mask hides another
shows. Only sums are kept. Open directions that every update hides are left to the image prior.

Where the model sees a part of the patches only (`Observation.drops_patches`), updates are joined that share a patch,
and nothing is known of places that none of them shows: vouched for is what the equations settle without the prior.

It cannot recover a patch that every mask hides, and block-wise masks hide the middle most: at gamma 0.9 each of 80
rounds hides the same 41 to 62 of 196 patches (ten seeds), 2 to 10 of them still after 400. `never_seen` counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from attacks.base import Attack
from attacks.linear.completion import complete, render, sure_patches
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.position_rows import PositionRows, unseen_noise
from attacks.mjp.joined_updates import join_updates, nothing_masked, obstacle_to_joining, read_update
from attacks.mjp.rounded import correct_rounded, inexact, seconds_of_correction
from attacks.mjp.subspace import details_of
from attacks.observation import Capability, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class MJPRounds(Attack):
    """Whole image of the last update, from all updates that show it.

    Args:
        prior: settles the directions that every update hides.
        intervals: where the message has fewer digits than float32, solve with the error of every entry
            (`attacks.mjp.rounded`).
    """

    prior: VectorialVariation = field(default_factory=VectorialVariation)
    intervals: bool = True

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.SEVERAL_ROUNDS})
    needs_one_of: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})
    updates_wanted: ClassVar[int] = 8  # at gamma 0.5, 97 % of the patches of vit_mini_64; at 0.9, eighty give half

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`."""
        reason = nothing_masked(observations[-1], spans=True)
        last = None if reason else read_update(observations[-1], spans=True)
        if reason or not isinstance(last, PositionRows):
            return reason
        if self.intervals and len(observations) > 1 and inexact(last):
            return ""  # what belongs together shows when the last update is solved
        return obstacle_to_joining(observations, "mjp_subspace", spans=True)

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: every update is solved."""
        exact = super().estimated_seconds(observations) * len(observations)
        return exact + (seconds_of_correction(observations) if self.intervals else 0.0)

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` adds numbers over all updates.

        Updates used, those of them in another view than the last one's (changed), patches never seen, open directions
        and misfit.
        """
        target, joined = observations[-1], join_updates(observations, spans=True)
        estimate, updates = joined.estimate(), joined.equations.updates
        completed = complete(self.prior, estimate, joined.tokenizer, target.std, joined.shown, updates=updates)
        # Of one update without position gradient: of the patches that the probabilities give, seven of ten are wrong
        # (shipped vit_mini_64_mjp, gamma 0.3, seven photographs; of two to four updates 13, 11 and 3 %).
        alone = updates == 1 and not isinstance(read_update(target, spans=True), PositionRows)
        settled = joined.last.dropped or alone
        settling = observations, joined.tokenizer, estimate, completed, joined.deviation
        sure = sure_patches(*settling, settled=settled, noisy=joined.noisy)
        details = details_of(joined.last, sure) | {
            "updates": updates,
            "changed": joined.changed,
            "never_seen": int((~joined.shown).sum()),
            "open": len(estimate.open),
            "residual": estimate.residual,
        }
        diagnosis, patches = "; ".join([*joined.reasons, *unseen_noise(joined.noisy)]), completed.patches
        if self.intervals:
            patches, details["updates"] = correct_rounded(observations, patches, self.prior, updates)
        return render(target, joined.tokenizer, patches, sure, diagnosis, details)
