"""Masked updates of low precision: all updates of one image solved together with the error of every entry.

See `attacks.linear.errors_in_variables`. The answer starts from what the solve of the last update and the prior gave,
and is not vouched for more than that was: the deviations of confidence are those of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from attacks.linear.errors_in_variables import correct
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.position_rows import PositionRows, unmet_assumptions
from attacks.linear.rounded_updates import rounded_system
from attacks.mjp.joined_updates import read_update, updates_of_last_image
from attacks.mjp.span_update import SpanUpdate
from attacks.observation import Observation

# Strength of the prior, relative to that for float32: of 1 and 4 the better on two photographs (trained vit_mini_64).
STRENGTHENED = 4.0
# Misfit of the equations above which the search for factors and patches together has not come near the solution, as it
# does not from the starts that float16 leaves: 1 is expected there, and local optima had 3 to 40.
LARGEST_MISFIT = 1.5


def correct_rounded(
    observations: Sequence[Observation], patches: Tensor, prior: VectorialVariation, updates: int = 1
) -> tuple[Tensor, int]:
    """The patches of the last update's image by the updates of low precision that show it, and the number of updates.

    Args:
        observations: of one client, oldest first.
        patches: (N, P), normalised, that a solve without bounds completed; they are returned where the last update has
            the digits of float32 or no position gradient, sums more than one gradient or hides every patch.
        prior: of the image.
        updates: whose equations gave `patches`.

    Raises:
        UsageError: the last update cannot be read.
    """
    target, last = observations[-1], read_update(observations[-1], spans=True)
    if not _fits(last):
        return patches, updates
    stronger = replace(prior, strength=STRENGTHENED * prior.strength)
    alone = correct([rounded_system(last)], patches, last.tokenizer, target.std, stronger)
    start = alone.patches if alone.misfit < LARGEST_MISFIT else patches
    rows = [last]
    if len(observations) > 1 and last.tokenizer.patch_dim > last.tokenizer.num_patches:
        rows = [one for one in updates_of_last_image(observations, plain=True) if _fits(one)]
    if len(rows) > 1:
        joined = correct([rounded_system(one) for one in rows], start, last.tokenizer, target.std, stronger)
        if joined.misfit < LARGEST_MISFIT:
            return joined.patches, len(rows)
    return start, updates


def _fits(update: PositionRows | SpanUpdate) -> bool:
    """Whether an update is one gradient of low precision, with position rows, a visible patch and none dropped."""
    if isinstance(update, SpanUpdate) or update.dropped:
        return False
    unmet = unmet_assumptions(update.num_examples, update.local_steps)
    return update.bounds is not None and not unmet and not bool(update.masked.all())
