"""Masked updates of low precision: all updates of one image solved together with the error of every entry.

See `attacks.linear.errors_in_variables`, and `attacks.linear.inexact_updates` for start, solves and the test of which
updates show the image: beside it, those are taken that the tests of `attacks.mjp.same_image` find, which rounding
often leaves with nothing. Nothing of the answer is vouched for: confidence was calibrated on messages of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from attacks.linear.image_prior import VectorialVariation
from attacks.linear.inexact_updates import predicts, solve_as_exact, solve_inexact
from attacks.linear.position_rows import PositionRows, unmet_assumptions
from attacks.linear.rounded_updates import rounded_system
from attacks.mjp.joined_updates import read_update, updates_of_last_image
from attacks.mjp.span_update import SpanUpdate
from attacks.observation import Observation
from attacks.registry import UsageError

# Strength of the prior, relative to that for float32: of 1 and 4 the better on two photographs (trained vit_mini_64).
STRENGTHENED = 4.0
# Misfit of the equations above which the search for factors and patches together has not come near the solution, where
# 1 is expected. Of 1.5 and 3 the better on eleven photographs (trained vit_mini_64; bfloat16, float16). One update that
# shows nearly all patches is nearer to the photograph even so: at gamma 0.1 by 1.7 dB in the median (32 messages of
# eighteen photographs in float16 and as returned weights; two lost 0.1; misfits of 1.2 to 185). At 0.5 the median is
# 0.4 dB, at 0.9 it is -0.9 (twenty messages of ten photographs each).
LARGEST_MISFIT, NEARLY_ALL, LARGEST_OF_NEARLY_ALL = 3.0, 0.75, 1000.0
# Seconds of one CPU core for an update of D channels times D N^2, all solves together (1e-6 to 3.5e-6 measured).
SECONDS_A_PRODUCT = 1.2e-6


def correct_rounded(
    observations: Sequence[Observation], patches: Tensor, prior: VectorialVariation, updates: int = 1
) -> tuple[Tensor, int]:
    """The patches of the last update's image by the updates of low precision that show it, and the number of updates.

    Args:
        observations: of one client, oldest first.
        patches: (N, P), normalised, that a solve without bounds completed; they are returned where the last update is
            not `inexact`, and where no solve comes near a solution.
        prior: of the image.
        updates: whose equations gave `patches`.

    Raises:
        UsageError: the last update cannot be read.
    """
    target, last = observations[-1], read_update(observations[-1], spans=True)
    if not inexact(last):
        return patches, updates
    stronger = replace(prior, strength=STRENGTHENED * prior.strength)
    solving = last.tokenizer, target.std, stronger
    alone = solve_inexact([rounded_system(last)], [patches], *solving)
    fits = alone.misfit < LARGEST_MISFIT
    rows = [*_of_same_image(observations, last, alone.patches), last]
    if len(rows) > 1:
        start = solve_as_exact(rows, target.std, prior)
        starts = [start, alone.patches] if fits else [start]
        joined = solve_inexact([rounded_system(one) for one in rows], starts, *solving)
        if joined.misfit < LARGEST_MISFIT or not fits:
            return (joined.patches if joined.misfit < LARGEST_MISFIT else start), len(rows)
    fits = fits or (len(rows) == 1 and _shows_nearly_all(last) and alone.misfit < LARGEST_OF_NEARLY_ALL)
    return (alone.patches, 1) if fits else (patches, updates)


def _of_same_image(observations: Sequence[Observation], last: PositionRows, patches: Tensor) -> Iterator[PositionRows]:
    """The earlier updates that show the image of the last one, of which `patches` are known."""
    found = updates_of_last_image(observations, plain=True) if len(observations) > 1 else []
    for observation in observations[:-1]:
        try:
            update = read_update(observation, spans=True)
        except UsageError:
            continue
        if not inexact(update) or update.tokenizer != last.tokenizer or not update.products.isfinite().all():
            continue
        if any(one is update for one in found) or predicts(patches, rounded_system(update), last.tokenizer):
            yield update


def _shows_nearly_all(update: PositionRows) -> bool:
    return float((~update.masked).double().mean()) >= NEARLY_ALL


def seconds_of_correction(observations: Sequence[Observation]) -> float:
    """Time that `correct_rounded` takes on these updates, within a factor of about three."""
    try:
        last = read_update(observations[-1], spans=True)
    except UsageError:
        return 0.0
    if not inexact(last):
        return 0.0
    return SECONDS_A_PRODUCT * len(observations) * last.tokenizer.width * last.tokenizer.num_patches**2


def inexact(update: PositionRows | SpanUpdate) -> bool:
    """Whether an update is one gradient of fewer digits than float32, with position rows, a visible patch and none
    dropped."""
    if isinstance(update, SpanUpdate) or update.dropped:
        return False
    unmet = unmet_assumptions(update.num_examples, update.local_steps)
    return update.bounds is not None and not unmet and not bool(update.masked.all())
