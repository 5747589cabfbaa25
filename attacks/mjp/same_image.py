"""Whether two updates show the same image, and in which view.

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
the row space; they are found by agreement alone, with unmixed channels. Patches of a uniform background agree at every
shift: where the row spaces are equal, a shift counts only by what sets the compared patches apart from each other.

Updates that hide so much that hardly any place is shown by both are joined by the row space alone, where the image is
neither shifted nor recoloured. The weights of the network may change between updates; masked, unmasked and unjigsawed
steps mix freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.linear.masked_update import MaskedUpdate
from attacks.linear.position_rows import PositionRows
from attacks.linear.row_space import RowSpace
from attacks.linear.views import View, all_shifts, mean_colours, mirror, mix_channels
from attacks.mjp.span_update import SpanUpdate
from attacks.tokenizer import Tokenizer

# Largest misfit of updates that agree. Float32 leaves 1e-10 to 1e-5 between views of one photograph, a change of
# saturation that is taken for none 1e-3 and more.
AGREEMENT = 1e-4
# The same where the row spaces are equal already: other shifts and orders of the patches have about 1.
SAME_SPACE = 0.5
# Colours have changed where that lowers the misfit to less than this share, from more than float64 rounds it to.
SAME_COLOURS, ROUNDED = 0.1, 1e-12
# Least share of what the target shows, by squared size, that must be compared for an agreement to count.
LEAST_COMPARED = 0.1
# In the same row space a shift counts where it leaves less than this share of what the compared patches differ by among
# each other: patches of a uniform background agree at every shift.
TELLING = 0.1
# Patches by which the image may be shifted in each direction.
FARTHEST = 4


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
        source = all_shifts(self.tokenizer.grid, mirrored, 0)[0].to(self.update.rows.device)
        return View.of(self.tokenizer, source, mirrored=mirrored)

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
        if same_colours:
            misfits = torch.where(_telling(kept, both, misfits * sizes), misfits, torch.inf)
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


def _telling(ours: Tensor, both: Tensor, left: Tensor) -> Tensor:
    """(S,) bool: whether a shift explains by what the compared patches differ; the first, which is none, needs not.

    Args:
        ours: r, (N, P).
        both: (S, N) bool, places that both show.
        left: (S,) squared size of what the shift leaves.
    """
    compared, counts = both.to(ours), both.sum(dim=1).clamp(min=1)
    spread = compared @ ours.square().sum(dim=1) - (compared @ ours).square().sum(dim=1) / counts
    found = left < TELLING * spread
    found[0] = True
    return found
