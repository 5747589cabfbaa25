"""The equations that one update with masked positions gives: rows, the directions that are hidden, and their errors.

One image, U its visible and M its masked patches. With S = [dL/dE, dL/db], (D, P + 1), and every patch extended by a
pixel of constant value 1, X = [patches, 1], the patch projection's gradient is

    S = G_U^T X_U + G_M^T X_M,

where G_U (the position rows) is in the message and G_M is not: masked positions add into one shared row. That is the
system of `attacks.linear.least_squares` with h = |M| hidden rows.

*Span.* The hidden rows of S span the masked patches, whichever is where (jigsawing permutes them among themselves), as
long as D - |U| >= |M|. (With fewer channels than patches several updates do: `attacks.linear.completed_spans`.)

*Rows.* The solve gives X_U + C X_M with C unknown: right except within that span.

*Constant pixel.* In the last column both sides are known to be 1. That removes one direction from the span: if masked
patches are copies of each other (a uniform background), it removes the only one there is.

*Size of the error.* G_M^T X_M has D rows, of which R shows D - |U|, orthogonal to the ones that enter the solve for
X_U. Taking all D for draws from one distribution with second moment T = R^T R / (D - |U|), the error of visible row p
is N(0, |e_p|^2 T) with e_p row p of the pseudo-inverse of G_U^T, and the same T holds for the masked patches: weighted
by their |g|^2, which are taken for equal, their second moment is T / T_cc where T_cc is the entry of the constant
pixel. Conditioned on the constant pixel, with m = T_c. / T_cc,

    x_p = l_p - (l_pc - 1) m + N(0, s_p^2 (T - T_cc m m^T)),     s_p = |e_p| visible (l_p the solve's row),
                                                                  s_p = T_cc^-1/2 masked (l_p = 0).

Measured on photographs with deit_s the visible errors have the predicted size (median of squared z-scores 0.8 to 1.5,
with a heavier tail than a Gaussian's). The masked ones exceed it in the trailing directions, where a single patch with
a weak gradient may live, so their deviation is taken MASKED_SLACK times as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.least_squares import RowSolution, solve_rows
from attacks.linear.normal_equations import Estimate, NormalEquations
from attacks.linear.position_rows import PositionRows

# Of 1, 2, 3, 5 and 10, measured on sixteen ImageNet photographs; the last three differ by 0.2 dB.
MASKED_SLACK = 10.0
# Of a pixel, where what an update settles stands beside what it leaves open.
LEAST_NOISE = 3e-5


@dataclass(frozen=True)
class MaskedUpdate:
    """The equations of one update with masked positions.

    Attributes:
        rows: l, (N, P) float64 normalised pixels, best guess of every patch.
        basis: B, (k, P) orthonormal: the hidden directions, along which rows are wrong.
        scale, sizes: (N,) and (k,); the error of row p along row j of `basis` has deviation scale_p sizes_j.
        tilt: (k,) expected squared sine of the angle by which noise turns each row of `basis`.
        masked: (N,) bool.
        noise: rms error of a visible row's pixel off the basis.
        deviation: (N,) standard error of a pixel of each visible row off the basis, by the message's noise; 0 of masked
            ones, and where `sums` weighs the equations.
        rank: numerical rank of the hidden rows.
        condition: of G_U.
        dal_weight: see `PositionRows`.
        reasons: why the update does not hold the equations that the estimator takes it to hold, in words; empty where
            it does.
        boundless: the only reason is that the masked patches may be anything, so that the others may be, too.
        mixed: the only reason is that noise hides too much of the visible rows to tell all patches apart.
        narrow: the only reason is that fewer channels than patches show a part of the hidden directions only
            (`attacks.linear.completed_spans`).
        sums: the equations where they have different weights; None where rows, basis and noise say all.
        dropped: masked places may hold patches that are in no equation (`Observation.drops_patches`).
    """

    rows: Tensor
    basis: Tensor
    scale: Tensor
    sizes: Tensor
    tilt: Tensor
    masked: Tensor
    noise: float
    deviation: Tensor
    rank: int
    condition: float
    dal_weight: float
    reasons: tuple[str, ...]
    boundless: bool = False
    mixed: bool = False
    narrow: bool = False
    sums: NormalEquations | None = None
    dropped: bool = False

    @property
    def spread(self) -> Tensor:
        """(N, k) deviations of the error of `rows` along `basis`."""
        return self.scale[:, None] * self.sizes

    def equations(self) -> NormalEquations:
        """This update's equations, weighed by its own noise; none for masked places that may be `dropped`."""
        found = self.sums
        if found is None:
            found = NormalEquations(*self.rows.shape, device=self.rows.device)
            found.add(self.rows, self.basis, self.noise**-2, self.tilt)
        places = torch.arange(len(self.masked), device=self.masked.device)
        return found.renumbered(places.masked_fill(self.masked, -1)) if self.dropped else found

    def estimate(self) -> Estimate:
        """The estimate from this update alone; equals `NormalEquations.solve` without an eigendecomposition."""
        centre = self.rows @ self.basis.T
        if self.dropped:
            return self._estimate_of_visible()
        fixed = self.rows - centre @ self.basis
        return Estimate(fixed, self.basis, centre, self.spread.square().reciprocal(), self.noise, 0.0)

    def _estimate_of_visible(self) -> Estimate:
        """The same where nothing is known of masked places: every direction is open, at each patch's own precision."""
        every = torch.linalg.qr(self.basis.T, mode="complete").Q.T  # (P, P), those of the basis first
        noise = max(self.noise, LEAST_NOISE)
        precision = self.rows.new_full(self.rows.shape, noise**-2)
        precision[:, : len(self.basis)] = self.spread.clamp(min=noise).square().reciprocal()
        precision[self.masked] = 0
        return Estimate(torch.zeros_like(self.rows), every, self.rows @ every.T, precision, self.noise, 0.0)


def solve_masked(update: PositionRows) -> MaskedUpdate:
    """Solve one update of one image for its visible patches and the span of its masked ones."""
    masked, p = update.masked, update.tokenizer.patch_dim
    hidden = update.hidden
    visible = (update.rows[~masked] * update.weights)[None]  # G_U, (1, U, D)
    products = (update.products * update.weights[:, None])[None]
    solution = solve_rows(visible, products, hidden=hidden, sent=update.dtype)[0]
    guess = solution.rows.new_zeros(len(masked), p)
    guess[~masked] = solution.rows[:, :p]
    basis, sizes = guess[:0], guess[:0, 0]
    scale = guess.new_ones(len(masked))
    if len(solution.unknown):
        guess, basis, sizes, masked_scale = _use_constant_pixel(guess, solution, masked, p)
        scale[masked] = MASKED_SLACK * masked_scale
        scale[~masked] = solution.gains.sqrt()
    noise, spare = solution.noise, max(solution.spare, 1)
    deviation = torch.zeros_like(scale)
    deviation[~masked] = noise * solution.gains.sqrt()
    hides = update.tokenizer.hides_positions  # else the rows are zero for another reason
    usable = not update.dropped and not update.unmet_assumptions()
    anything = hides and bool(masked.all() or hidden >= update.products.shape[1])
    return MaskedUpdate(
        rows=guess,
        basis=basis,
        scale=scale,
        sizes=(sizes.square() + noise**2).sqrt(),
        tilt=(p * noise**2 / (spare * sizes.square())).clamp(max=1),
        masked=masked,
        noise=noise * float(solution.gains.mean()) ** 0.5 if len(solution.gains) else noise,
        deviation=deviation,
        rank=len(solution.unknown),
        condition=solution.condition,
        dal_weight=update.dal_weight,
        reasons=tuple(_reasons(update, solution)),
        boundless=anything and usable,
        mixed=hides and not anything and _is_mixed(update, solution) and usable,
        narrow=hides and not anything and _is_narrow(update, solution) and usable,
        dropped=update.dropped,
    )


def _is_mixed(update: PositionRows, solution: RowSolution) -> bool:
    """Whether the noise, and not the number of channels, leaves the visible rows fewer directions than patches."""
    visible = int((~update.masked).sum())
    return update.tokenizer.width - visible >= update.hidden and solution.rank < visible


def _is_narrow(update: PositionRows, solution: RowSolution) -> bool:
    """Whether the channels tell the visible rows apart, and beyond them show a part of the hidden ones only."""
    visible = int((~update.masked).sum())
    return _shown(update, solution) < update.hidden and solution.rank == visible > 0


def _shown(update: PositionRows, solution: RowSolution) -> int:
    """How many of the hidden directions the channels beyond the visible rows can show.

    At the tokens of a pre-norm ViT gradients are orthogonal to the constant vector: of as many channels as patches one
    shows nothing.
    """
    beyond = max(update.tokenizer.width - int((~update.masked).sum()), 0)
    return min(beyond, len(solution.unknown)) if beyond <= update.hidden else update.hidden


def _reasons(update: PositionRows, solution: RowSolution) -> list[str]:
    """See `MaskedUpdate.reasons`."""
    tokenizer, reasons = update.tokenizer, update.unmet_assumptions()
    hidden, visible = update.hidden, int((~update.masked).sum())
    width, p, mask = tokenizer.width, tokenizer.patch_dim, update.mask_in_words()
    if not visible:
        reasons.append(f"{mask}: no patch is visible, so there is nothing to solve with")
    elif hidden >= update.products.shape[1]:
        reasons.append(f"{mask}, and patches have only {p} values: what is hidden may be anything (needs masked < {p})")
    elif _shown(update, solution) < hidden:
        reasons.append(
            f"{mask}; with {width} channels only {_shown(update, solution)} directions of the {hidden} hidden ones can "
            f"be seen (needs more channels than patches, here {width} and {len(update.masked)})"
        )
    elif solution.rank < visible:
        told_apart = f"rank {solution.rank} of {visible}: some patches stay mixed"
        reasons.append(
            f"{mask} and the others have {told_apart}"
            if hidden
            else f"the position rows have {told_apart} "
            "(patch_embedding settles them by its prior, and vouches for the others)"
        )
    return reasons


def _use_constant_pixel(
    guess: Tensor, solution: RowSolution, masked: Tensor, patch_dim: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Rows (N, P), basis (k, P), sizes (k,) of the errors along it, and the scale of a masked patch."""
    factors = solution.unknown
    patches = factors[:, :patch_dim]  # (k, P)
    if factors.shape[1] == patch_dim:  # no bias: nothing shows how large a masked patch is; a pixel's variance is 1
        centre, schur, masked_scale, offset = 0.0, patches, float(patch_dim**0.5 / patches.norm()), None
    else:
        constant = factors[:, -1:]  # (k, 1)
        power = constant.square().sum()  # T_cc
        centre = (constant * patches).sum(dim=0) / power  # m, (P,)
        schur = patches - constant * centre
        masked_scale = float(power.rsqrt())
        offset = guess.new_full((len(guess), 1), -1.0)
        offset[~masked] = solution.rows[:, -1:] - 1
    rows = guess if offset is None else guess - offset * centre
    _, sizes, basis = torch.linalg.svd(schur, full_matrices=False)
    kept = len(factors) - (offset is not None)
    return rows, basis[:kept], sizes[:kept], masked_scale
