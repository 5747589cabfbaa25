"""Which updates of a client show the image of the last one, in which view, and their equations added up.

An update shows the target's image as it is, or as augmentation has changed it: mirrored, shifted by whole patches, or
in other colours (`attacks.linear.views`). Two tests find that out, mirrored and not:

*Row space* (`attacks.linear.row_space`): it does not depend on masks or on the order of patches, finds the mixture of
channels, and cannot be asked where patches have no more values than there are patches.

*Agreement.* Off the directions that either update hides (B, B'), every patch that both show is the same numbers at its
two places. So for each shift, with r = l P and r' = W l' P, P projecting off B, W B' and, unless the colours are known
to be the same, mean colours,

    misfit = min over s of  sum |r_p - s r'_q|^2 / sum |r_p|^2     over places p, q that both show.

It is noise for the right view; other photographs and other shifts have more than 0.1. Contrast and brightness are s and
the offset d, which follows from the same patches. Shifts bring in patches that the target does not have, which spoils
the row space; they are found by agreement alone, with unmixed channels.

Updates that hide so much that hardly any place is shown by both are joined by the row space alone, where the image is
neither shifted nor recoloured. The weights of the network may change between updates; masked, unmasked and unjigsawed
steps mix freely.

With more patches than channels no update shows its hidden span whole. There masked updates of the image in its place,
mirrored or not, are joined, three at least (`attacks.linear.completed_spans`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from attacks.linear.row_space import RowSpace
from attacks.linear.views import View, all_shifts, mean_colours, mirror, mix_channels
from attacks.mjp.span_update import SpanUpdate, read_span_update
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Largest misfit of updates that agree. Float32 leaves 1e-10 to 1e-5 between views of one photograph, a change of
# saturation that is taken for none 1e-3 and more.
AGREEMENT = 1e-4
# The same where the row spaces are equal already: other shifts and orders of the patches have about 1.
SAME_SPACE = 0.5
# Colours have changed where that lowers the misfit to less than this share, from more than float64 rounds it to.
SAME_COLOURS, ROUNDED = 0.1, 1e-12
# Least share of what the target shows, by squared size, that must be compared for an agreement to count.
LEAST_COMPARED = 0.1
# Patches by which the image may be shifted in each direction.
FARTHEST = 4


@dataclass(frozen=True)
class JoinedUpdates:
    """What a client's updates give for the last one's image.

    Attributes:
        tokenizer: of the observed model.
        last: the last update, solved.
        equations: of all updates that show its image.
        shown: (N,) bool, patches that at least one of them shows.
        reasons: why not to trust the equations, in words; empty where they hold.
        changed: of the updates, those in another view than the last one's.
    """

    tokenizer: Tokenizer
    last: MaskedUpdate
    equations: NormalEquations
    shown: Tensor
    reasons: tuple[str, ...]
    changed: int

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
    if not last.reasons:
        for _, update, view in _same_image(Target.of(target, last), target_and_earlier[:0:-1]):
            equations.merge(view.moved(update.equations(), tokenizer))
            shown = shown | view.flags(~update.masked)
            changed += not view.plain
    return JoinedUpdates(tokenizer, last, equations, shown, last.reasons, changed)


def _join_narrow(
    target: PositionRows | SpanUpdate, last: MaskedUpdate, earlier: Sequence[PositionRows | SpanUpdate | None]
) -> JoinedUpdates:
    """The same where each update shows a part of its hidden span only, and their differences the rest."""
    others = _narrow_of_same_image(target, last, earlier)
    updates, changed = [*(update for _, update, _ in others), last], sum(mirrored for *_, mirrored in others)
    if len(updates) < LEAST_UPDATES:
        found = "1 was" if len(updates) == 1 else f"{len(updates)} were"
        missing = f"{LEAST_UPDATES} updates of the image would show all of them, and {found} found"
        reasons = (*last.reasons, missing)
        return JoinedUpdates(target.tokenizer, last, last.equations(), ~last.masked, reasons, changed=0)
    *completed, last = complete_spans(updates)
    equations = last.equations()
    for update in completed:
        equations.merge(update.equations())
    shown = torch.stack([~update.masked for update in updates]).any(dim=0)
    return JoinedUpdates(target.tokenizer, last, equations, shown, (), changed)


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


def obstacle_to_joining(observations: Sequence[Observation], alone: str) -> str:
    """Why the earlier updates add nothing to the last one, or "".

    Clients with more than one image seldom send the same one twice; then an attack over rounds repeats the answer of
    `alone`, the attack on the last update, at several times its cost.
    """
    if len(observations) == 1:
        return f"only one update of this client was seen: {alone} gives the same answer"
    try:
        rows = updates_of_last_image(observations)
    except UsageError as error:
        return str(error)
    if len(rows) == 1:
        return f"no earlier update of this client shows the image of the last one: {alone} gives the same answer"
    return ""


def updates_of_last_image(
    observations: Sequence[Observation], *, plain: bool = False
) -> list[PositionRows | SpanUpdate]:
    """The updates that show the image of the last one, which comes last.

    Args:
        plain: leave out those in another view than the last one's.

    Raises:
        UsageError: the last update cannot be read at all.
    """
    *earlier, target = observations
    return list(target.once(_updates_of_last_image, tuple(earlier), plain))


def _updates_of_last_image(
    observation: Observation, before: tuple[Observation, ...], plain: bool
) -> list[PositionRows | SpanUpdate]:
    *earlier, target = _read_all([*before, observation], spans=False)
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
    named = "patch_embedding" if isinstance(rows, PositionRows) else "token_span"
    return f"no position is masked: {named} gives the same answer"


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


@dataclass(frozen=True)
class _Alignment:
    """A view and how well it fits.

    Attributes:
        view: it.
        misfit: of the patches that both show, without mean colours where those may differ.
        whole: of these patches with their mean colours.
    """

    view: View
    misfit: float
    whole: float


@dataclass(frozen=True)
class Target:
    """The update that others are compared with.

    Attributes:
        space: row space of its image; None where it could be everything.
        update: its equations.
        tokenizer: of its model.
    """

    space: RowSpace | None
    update: MaskedUpdate
    tokenizer: Tokenizer

    @classmethod
    def of(cls, rows: PositionRows | SpanUpdate, update: MaskedUpdate) -> Target:
        """Of an update, read and solved."""
        return cls(RowSpace.of(rows), update, rows.tokenizer)

    def view_of(self, rows: PositionRows | SpanUpdate, update: MaskedUpdate) -> View | None:
        """The view in which another update shows the same image; None where none is found."""
        if self.update.dropped or update.dropped:  # most places are shown by one of the two only
            other = RowSpace.of(rows)
            known = self.space is not None and other is not None and self.space.shares_a_patch(other)
            return self._unshifted(mirrored=False) if known else None
        for mirrored in (False, True):
            if self.space is not None and self.space.holds(rows, mirrored=mirrored):
                return self._in_same_space(update, mirrored)
        for mirrored in (False, True):
            mix = None if self.space is None else self.space.mix_of(rows, mirrored=mirrored)
            found = None if mix is None else self._aligned(update, mirrored, mix)
            if found is not None and found.misfit < AGREEMENT:
                return found.view
        aligned = (self._aligned(update, mirrored) for mirrored in (False, True))
        return next((found.view for found in aligned if found.misfit < AGREEMENT), None)

    def _unshifted(self, mirrored: bool) -> View:
        """The view without shift or change of colours."""
        return View.of(self.tokenizer, all_shifts(self.tokenizer.grid, mirrored, 0)[0], mirrored=mirrored)

    def _in_same_space(self, update: MaskedUpdate, mirrored: bool) -> View | None:
        """The view of an update with the same row space: unshifted in the same colours, unless another fits better.

        Images with uniform patches of two greys hold the constant pixel among their patches, and changes of brightness
        are not seen in their row space. It seldom survives a shift: where too few places are shown by both, the
        update counts as unshifted, because some shift of patches that are much alike would always fit.
        """
        still = self._aligned(update, mirrored, same_colours=True)
        if still.misfit == torch.inf:
            return still.view
        changed = self._aligned(update, mirrored)
        recoloured = changed.whole < SAME_COLOURS * still.whole and still.whole > ROUNDED
        if changed.misfit < AGREEMENT and recoloured:
            return changed.view
        return still.view if still.misfit < SAME_SPACE else None

    def _aligned(
        self, update: MaskedUpdate, mirrored: bool, mix: Tensor | None = None, *, same_colours: bool = False
    ) -> _Alignment:
        """The view at a shift that agrees, or else has the least misfit, with the colours that follow.

        Where too little is shown by both to be compared (with `same_colours`: unshifted): that view and infinity.

        Args:
            mix: W up to a factor; None for the identity.
            same_colours: W = I and d = 0.
        """
        tokenizer, ours = self.tokenizer, self.update
        theirs, basis = (_painted(patches, mirrored, mix, tokenizer) for patches in (update.rows, update.basis))
        colours = mean_colours(tokenizer).to(ours.rows)
        hidden = [ours.basis, basis] if same_colours else [ours.basis, basis, colours]
        unknown = _Alignment(self._unshifted(mirrored), torch.inf, torch.inf)
        if sum(map(len, hidden)) >= tokenizer.patch_dim:  # nothing that both show
            return unknown
        kept, other = _projected([ours.rows, theirs], torch.cat(hidden))
        source = all_shifts(tokenizer.grid, mirrored, FARTHEST).to(ours.masked.device)  # (S, N)
        both = (source >= 0) & ~ours.masked & ~update.masked[source]  # (S, N)
        misfits, factors, sizes = _misfits(kept, other, both, source, ~ours.masked, scaled=not same_colours)
        if same_colours and misfits[0] == torch.inf:
            return unknown
        agree = misfits < AGREEMENT  # also by chance, of uniform patches alone: unmoved is likeliest
        most = 0 if agree[0] else torch.where(agree, sizes, -1).argmax()
        best = int(most if agree.any() else misfits.argmin())
        view, misfit = View.of(tokenizer, source[best], mirrored=mirrored), float(misfits[best])
        if same_colours or misfit == torch.inf:
            return _Alignment(view, misfit, misfit)
        factor, shown = float(factors[best]), both[best]
        mix = factor * (torch.eye(tokenizer.channels).to(theirs) if mix is None else mix)
        difference = ours.rows[shown] - factor * theirs[source[best][shown]]
        hidden = torch.cat([ours.basis, basis])
        off, toward, size = _projected([difference, colours, ours.rows[shown]], hidden)
        along = torch.linalg.pinv(toward @ toward.T, hermitian=True) @ (toward @ off.mean(dim=0))
        whole = float((off - along @ toward).square().sum() / size.square().sum())
        return _Alignment(replace(view, mix=mix, offset=along * colours[0].max()), misfit, whole)


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


def _painted(patches: Tensor, mirrored: bool, mix: Tensor | None, tokenizer: Tokenizer) -> Tensor:
    """Patches (..., P) mirrored and with their channels mixed."""
    patches = mirror(patches, tokenizer) if mirrored else patches
    return patches if mix is None else mix_channels(patches, mix)


def _projected(parts: Sequence[Tensor], hidden: Tensor) -> list[Tensor]:
    """Rows (..., P) without what lies in the span of the rows of `hidden` (k, P)."""
    basis = torch.linalg.qr(hidden.T)[0]  # (P, k)
    return [part - (part @ basis) @ basis.T for part in parts]


def _misfits(
    ours: Tensor, theirs: Tensor, both: Tensor, source: Tensor, shown: Tensor, *, scaled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Misfit, infinite where too little is compared, factor s and squared size of that, for every shift, (S,) each.

    Args:
        ours, theirs: r and r', (N, P).
        both: (S, N) bool, places that both show.
        source: (S, N) the other's place.
        shown: (N,) bool, places that the target shows.
    """
    products, lengths, others = ours @ theirs.T, ours.square().sum(dim=1), theirs.square().sum(dim=1)
    size = (both * lengths).sum(dim=1)
    cross = (both * products.gather(1, source.T.clamp(min=0)).T).sum(dim=1)
    own = (both * others[source]).sum(dim=1)
    factor = cross / own.clamp(min=1e-300) if scaled else torch.ones_like(cross)
    misfit = (size - 2 * factor * cross + factor.square() * own) / size.clamp(min=1e-300)
    enough = (size > LEAST_COMPARED * lengths[shown].sum()) & (factor > 0)
    return torch.where(enough, misfit, torch.inf), factor, size
