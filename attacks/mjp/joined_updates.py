"""Which updates of a client show the image of the last one, in which view, and their equations added up.

`attacks.mjp.same_image` tests which of them do.

With more patches than channels no update shows its hidden span whole. There masked updates of the image in its place,
mirrored or not, are joined, three at least (`attacks.linear.completed_spans`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.completed_spans import LEAST_UPDATES, complete_spans, completes, mirrored_update
from attacks.linear.masked_update import MaskedUpdate, solve_masked
from attacks.linear.normal_equations import Estimate, NormalEquations
from attacks.linear.position_rows import (
    WITHOUT_WEIGHTS,
    PositionRows,
    missing_positions,
    position_gradient,
    read_position_rows,
)
from attacks.linear.views import View
from attacks.mjp.same_image import Target
from attacks.mjp.span_update import SpanUpdate, read_span_update
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True)
class JoinedUpdates:
    """What a client's updates give for the last one's image.

    Attributes:
        tokenizer: of the observed model.
        last: the last update, solved.
        equations: of all updates that show its image.
        shown: (N,) bool, patches that at least one of them shows.
        deviation: (N,) standard error of a pixel of each patch by the noise of the updates that show it.
        reasons: why not to trust the equations, in words; empty where they hold.
        changed: of the updates, those in another view than the last one's.
        noisy: one of them holds more than round-off explains; None where nothing shows whether one does.
    """

    tokenizer: Tokenizer
    last: MaskedUpdate
    equations: NormalEquations
    shown: Tensor
    deviation: Tensor
    reasons: tuple[str, ...]
    changed: int
    noisy: bool | None

    def estimate(self) -> Estimate:
        """The solution of all equations."""
        return self.last.estimate() if self.equations.updates == 1 else self.equations.solve()


def join_updates(observations: Sequence[Observation], *, spans: bool = False) -> JoinedUpdates:
    """Add up the updates that show the image of the last observation.

    Args:
        spans: updates without position gradient are read by the spans of their first attention.

    Raises:
        UsageError: the last update cannot be read at all.
    """
    target, *_ = target_and_earlier = _read_all(observations, spans)[::-1]
    last = solve(target)
    if last.narrow:
        return _join_narrow(target, last, target_and_earlier[:0:-1])
    tokenizer, equations, shown, changed = target.tokenizer, last.equations(), ~last.masked, 0
    read, shows = [target], [(last, _unmoved(last, tokenizer))]
    if not last.reasons:
        for rows, update, view in _same_image(Target.of(target, last), target_and_earlier[:0:-1]):
            read.append(rows)
            equations.merge(view.moved(update.equations(), tokenizer))
            shown = shown | view.flags(~update.masked)
            changed += not view.plain
            shows.append((update, view))
    deviation, noisy = _deviation(shows), _noisy(read)
    return JoinedUpdates(tokenizer, last, equations, shown, deviation, last.reasons, changed, noisy)


def _noisy(updates: Sequence[PositionRows | SpanUpdate]) -> bool | None:
    """See `JoinedUpdates.noisy`."""
    found = [update.noisy for update in updates]
    return True if True in found else None if None in found else False


def _unmoved(update: MaskedUpdate, tokenizer: Tokenizer) -> View:
    """The view that shows every patch in its own place."""
    return View.of(tokenizer, torch.arange(len(update.masked), device=update.masked.device))


def _deviation(shows: Sequence[tuple[MaskedUpdate, View]]) -> Tensor:
    """See `JoinedUpdates.deviation`: each update's equations have the weight of its mean noise."""
    weights = torch.stack([update.noise**-2 * view.flags(~update.masked) for update, view in shows])  # (T, N)
    weights = weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).tiny)
    own = torch.stack([update.deviation[view.source] for update, view in shows])
    return (weights * own).square().sum(dim=0).sqrt()


def _join_narrow(
    target: PositionRows | SpanUpdate, last: MaskedUpdate, earlier: Sequence[PositionRows | SpanUpdate | None]
) -> JoinedUpdates:
    """The same where each update shows a part of its hidden span only, and their differences the rest."""
    others = _narrow_of_same_image(target, last, earlier)
    updates, changed = [*(update for _, update, _ in others), last], sum(mirrored for *_, mirrored in others)
    noisy = _noisy([target, *(rows for rows, *_ in others)])
    if len(updates) < LEAST_UPDATES:
        found = "1 was" if len(updates) == 1 else f"{len(updates)} were"
        missing = f"{LEAST_UPDATES} updates of the image would show all of them, and {found} found"
        reasons = (*last.reasons, missing)
        own = last.equations(), ~last.masked, last.deviation
        return JoinedUpdates(target.tokenizer, last, *own, reasons, 0, noisy)
    *completed, last = complete_spans(updates)
    equations = last.equations()
    for update in completed:
        equations.merge(update.equations())
    shown = torch.stack([~update.masked for update in updates]).any(dim=0)
    deviation = _deviation([(update, _unmoved(update, target.tokenizer)) for update in updates])
    return JoinedUpdates(target.tokenizer, last, equations, shown, deviation, (), changed, noisy)


def _narrow_of_same_image(
    target: PositionRows | SpanUpdate, last: MaskedUpdate, earlier: Sequence[PositionRows | SpanUpdate | None]
) -> list[tuple[PositionRows | SpanUpdate, MaskedUpdate, bool]]:
    """Those of the earlier updates that show the target's image, solved for its places, and whether mirrored."""
    found = []
    for rows in earlier:
        if rows is None or rows.tokenizer != target.tokenizer:
            continue
        update = solve(rows)
        for mirrored in (False, True):
            moved = mirrored_update(update, target.tokenizer) if mirrored else update
            if completes(last, moved):
                found.append((rows, moved, mirrored))
                break
    return found


def obstacle_to_joining(observations: Sequence[Observation], alone: str, *, spans: bool = False) -> str:
    """Why the earlier updates add nothing to the last one, or "".

    Clients with more than one image seldom send the same one twice; then an attack over rounds repeats the answer of
    `alone`, the attack on the last update, at several times its cost.

    Args:
        spans: see `join_updates`.
    """
    if len(observations) == 1:
        return f"only one update of this client was seen: {alone} gives the same answer"
    try:
        rows = updates_of_last_image(observations, spans=spans)
    except UsageError as error:
        return str(error)
    if len(rows) == 1:
        return f"no earlier update of this client shows the image of the last one: {alone} gives the same answer"
    return ""


def updates_of_last_image(
    observations: Sequence[Observation], *, plain: bool = False, spans: bool = False
) -> list[PositionRows | SpanUpdate]:
    """The updates that show the image of the last one, which comes last.

    Args:
        plain: leave out those in another view than the last one's.
        spans: see `join_updates`.

    Raises:
        UsageError: the last update cannot be read at all.
    """
    *earlier, target = observations
    return list(target.once(_updates_of_last_image, tuple(earlier), plain, spans))


def _updates_of_last_image(
    observation: Observation, before: tuple[Observation, ...], plain: bool, spans: bool
) -> list[PositionRows | SpanUpdate]:
    *earlier, target = _read_all([*before, observation], spans)
    last = solve(target) if target.products.isfinite().all() else None
    if last is not None and last.narrow:
        found = _narrow_of_same_image(target, last, earlier)
        used = [rows for rows, _, mirrored in found if not (plain and mirrored)]
        return [*used, target] if len(found) + 1 >= LEAST_UPDATES else [target]
    if last is None or last.reasons:
        return [target]
    found = _same_image(Target.of(target, last), earlier)
    return [*(rows for rows, _, view in found if view.plain or not plain), target]


def read_update(observation: Observation, *, spans: bool) -> PositionRows | SpanUpdate:
    """One update by its position gradient, or without one and with `spans` by the spans of its first attention.

    Raises:
        UsageError: it can be read in neither way.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    added = tokenizer.positions is not None or tokenizer.fixed_positions is not None
    if not (spans and added) or position_gradient(observation, tokenizer) is not None:
        return read_position_rows(observation)
    if not observation.weights_granted:
        raise UsageError(f"{missing_positions(observation, tokenizer)}; {WITHOUT_WEIGHTS}")
    try:
        return observation.once(read_span_update)
    except UsageError as error:
        raise UsageError(f"the update holds no position gradient, and without one: {error}") from error


def nothing_masked(observation: Observation, *, spans: bool = False) -> str:
    """Why attacks on masked updates add nothing to those on others, or why they cannot read this one; else "".

    Args:
        spans: see `read_update`.
    """
    try:
        rows = read_update(observation, spans=spans)
    except UsageError as error:
        return str(error)
    if rows.masked.any():
        return ""
    if isinstance(rows, SpanUpdate):
        return "no position is masked: token_span gives the same answer"
    if len(rows.masked) < rows.tokenizer.width:
        return "no position is masked: patch_embedding gives the same answer"
    return (
        "no position is masked: patch_embedding solves one such update, and noisy_rounds several of one image, which "
        "with no more channels than patches give more together"
    )


def solve(update: PositionRows | SpanUpdate) -> MaskedUpdate:
    """The equations of an update."""
    return update.solved if isinstance(update, SpanUpdate) else solve_masked(update)


def _read_all(observations: Sequence[Observation], spans: bool) -> list[PositionRows | SpanUpdate | None]:
    """Every update, read; None for an earlier one that cannot be read or holds no finite rows."""
    found: list[PositionRows | SpanUpdate | None] = []
    for observation in observations[:-1]:
        try:
            rows = read_update(observation, spans=spans)
        except UsageError:
            rows = None
        found.append(rows if rows is not None and rows.products.isfinite().all() else None)
    return [*found, read_update(observations[-1], spans=spans)]


def _same_image(
    target: Target, earlier: Sequence[PositionRows | SpanUpdate | None]
) -> Iterator[tuple[PositionRows | SpanUpdate, MaskedUpdate, View]]:
    """Those of the earlier updates that were read and show the target's image, with the view."""
    for rows in earlier:
        if rows is None or rows.tokenizer != target.tokenizer:
            continue
        update = solve(rows)
        view = None if update.reasons else target.view_of(rows, update)
        if view is not None:
            yield rows, update, view
