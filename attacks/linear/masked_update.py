"""What one update with masked positions says of its image: rows, the directions that spoil them, and by how much.

One image, U its visible and M its masked patches. With S = [dL/dE, dL/db], (D, P + 1), and every patch extended by a
pixel of constant value 1, X = [patches, 1], the patch projection's gradient is

    S = G_U^T X_U + G_M^T X_M,

where G_U (the position rows) is in the message and G_M is not: masked positions add into one shared row.

*Span.* With Q an orthonormal basis of what is orthogonal to span(G_U), R = Q^T S = (G_M Q)^T X_M: its rows span the
masked patches, whoever is where (jigsawing permutes them among themselves), as long as D - |U| >= |M|.

*Rows.* lstsq(G_U^T, S) = X_U + C X_M with C unknown: right except within that span.

*Constant pixel.* In the last column both sides are known to be 1. That takes one direction out of the span: if
masked patches are copies of each other (a uniform background), it takes out the only one there is.

*Size of the error.* G_M^T X_M has D rows, of which R shows D - |U|, orthogonal to the ones that spoil X_U. Taking all D
for draws from one distribution with second moment T = R^T R / (D - |U|), the error of visible row p is
N(0, |e_p|^2 T) with e_p row p of the pseudo-inverse of G_U^T, and the same T tells of the masked patches: weighted by
their |g|^2, which are taken for equal, their second moment is T / T_cc where T_cc is the entry of the constant pixel.
Conditioned on the constant pixel, with m = T_c. / T_cc,

    x_p = l_p - (l_pc - 1) m + N(0, s_p^2 (T - T_cc m m^T)),     s_p = |e_p| visible (l_p the solve's row),
                                                                  s_p = T_cc^-1/2 masked (l_p = 0).

Measured on photographs with deit_s the visible errors have the predicted size (median of squared z-scores 0.8 to 1.5,
with a heavier tail than a Gaussian's). The masked ones exceed it in the trailing directions, where a single patch with
a weak gradient may live, so their deviation is taken MASKED_SLACK times as large.

*Noise.* Singular values of R beyond the |M|-th hold nothing but noise; they give its level without an oracle, which
decides the rank of R and the ridge of the solve.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.closed_form.base import missing_positions, position_rows, unmet_assumptions
from attacks.linear.least_squares import noise_floor
from attacks.linear.normal_equations import Equations, Estimate
from attacks.linear.position_rows import CleanRows, clean_rows
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer

# Share of dL/db that the position rows may miss before they are taken for something else than token gradients.
IMBALANCE = 1e-4
# Singular values of R within this factor of the largest that pure noise would have are not trusted.
EDGE = 1.2
# Of 1, 2, 3, 5 and 10, measured on sixteen ImageNet photographs; the last three differ by 0.2 dB.
MASKED_SLACK = 10.0


@dataclass(frozen=True)
class HiddenUpdate:
    """One update, read.

    Attributes:
        rows: l, (N, P) float64 normalised pixels, best guess of every patch.
        basis: B, (k, P) orthonormal: the directions in which rows are spoilt.
        scale, sizes: (N,) and (k,); the error of row p along row j of `basis` has deviation scale_p sizes_j.
        tilt: (k,) expected squared sine of the angle by which noise turns each row of `basis`.
        clean: mask and position rows.
        noise: rms error of a visible row's pixel off the basis.
        rank: numerical rank of R.
        rank_visible, condition: of G_U.
        full: whether G_U has full row rank and R can show the whole span of the masked patches.
    """

    rows: Tensor
    basis: Tensor
    scale: Tensor
    sizes: Tensor
    tilt: Tensor
    clean: CleanRows
    noise: float
    rank: int
    rank_visible: int
    condition: float
    full: bool

    @property
    def spread(self) -> Tensor:
        """(N, k) deviations of the error of `rows` along `basis`."""
        return self.scale[:, None] * self.sizes

    def add_to(self, equations: Equations) -> None:
        """Add this update's equations, weighed by its own noise."""
        equations.add(self.rows, self.basis, self.noise**-2, self.tilt)

    def estimate(self) -> Estimate:
        """What this update alone says; `Equations.solve` without an eigendecomposition."""
        centre = self.rows @ self.basis.T
        fixed = self.rows - centre @ self.basis
        return Estimate(fixed, self.basis, centre, self.spread.square().reciprocal(), self.noise, 0.0)


def read_update(observation: Observation, tokenizer: Tokenizer, rows: Tensor) -> HiddenUpdate:
    """Read one update of one image.

    Args:
        rows: (N, D), the patches' rows of the position gradient as sent.
    """
    clean = clean_rows(observation, tokenizer, rows)
    g = clean.rows[~clean.masked]  # G_U, (U, D)
    s = products(observation, tokenizer)  # (D, P + 1), or (D, P) without a bias
    hidden = int(clean.masked.sum())
    left, sigma, right = torch.linalg.svd(g, full_matrices=True)  # (U, U), (min,), (D, D)
    rank = int((sigma > noise_floor(rows) * sigma[0]).sum()) if len(sigma) else 0
    sigma, seen = sigma[:rank], right[:rank] @ s  # (r,), (r, P + 1)
    rest = right[rank:] @ s  # R, (D - r, P + 1)
    level, factors = _span(rest, hidden, noise_floor(rows) * float(s.norm()) / max(s.shape) ** 0.5)
    ridge = (sigma.square() + level**2).reciprocal()  # pixels have variance 1
    solved = left[:, :rank] @ ((sigma * ridge)[:, None] * seen)  # (U, P + 1)
    error = left[:, :rank].square() @ ridge  # |e_p|^2, (U,), what the ridge shrinks counted in

    n, p = len(rows), tokenizer.patch_dim
    guess = s.new_zeros(n, p)
    basis, scale, sizes = s.new_zeros(0, p), s.new_ones(n), s.new_zeros(0)
    guess[~clean.masked] = solved[:, :p]
    if len(factors):
        guess, basis, sizes, masked_scale = _condition(guess, solved, factors, clean.masked, p)
        scale = s.new_full((n,), MASKED_SLACK * masked_scale)
        scale[~clean.masked] = error.sqrt()
    tilt = (p * level**2 / (len(rest) * sizes.square())).clamp(max=1)
    return HiddenUpdate(
        guess,
        basis,
        scale,
        (sizes.square() + level**2).sqrt(),
        tilt,
        clean,
        noise=level * float(error.mean()) ** 0.5 if len(error) else 0.0,
        rank=len(factors),
        rank_visible=rank,
        condition=float(sigma[0] / sigma[-1]) if rank else float("inf"),
        full=rank == len(g) and len(rest) >= hidden and p > hidden,
    )


def tokenizer_and_rows(observation: Observation) -> tuple[Tokenizer, Tensor]:
    """The tokenizer of the observed model and the patches' position rows (N, D).

    Raises:
        UsageError: the model or the update has none; in words.
    """
    tokenizer = find_tokenizer(observation.model, observation.image_shape)
    rows = position_rows(observation, tokenizer)
    if rows is None:
        raise UsageError(missing_positions(tokenizer))
    return tokenizer, rows[tokenizer.prefix :]


def why_not(observation: Observation, update: HiddenUpdate, tokenizer: Tokenizer) -> list[str]:
    """Why this update does not say what the estimator takes it to say, in words; empty where it does."""
    masked = update.clean.masked
    reasons = unmet_assumptions(observation, torch.zeros_like(masked))
    hidden, visible = int(masked.sum()), int((~masked).sum())
    width, p = tokenizer.width, tokenizer.patch_dim
    told = f"{hidden} of {len(masked)} position rows are exactly zero"
    if not visible:
        reasons.append(f"{told}: no patch is visible, so there is nothing to solve with")
    elif hidden >= p + (tokenizer.bias is not None):
        reasons.append(f"{told}, and patches have only {p} values: what is hidden may be anything (needs masked < {p})")
    elif width - visible < hidden:
        reasons.append(
            f"{told}; with {width} channels only {max(width - visible, 0)} directions of the {hidden} hidden ones can "
            f"be seen (needs channels >= patches, here {width} < {len(masked)})"
        )
    elif not update.full:
        reasons.append(f"{told} and the others have rank {update.rank_visible} of {visible}: some patches stay mixed")
    if update.clean.imbalance > IMBALANCE:
        reasons.append(
            f"the position rows miss the projection bias' gradient by {update.clean.imbalance:.2%}: something else "
            "than tokens feeds them (noise, or an unknown loss on the position embedding)"
        )
    return reasons


def products(observation: Observation, tokenizer: Tokenizer) -> Tensor:
    """S, (D, P + 1): dL/dE and, where there is one, dL/db as the column of the constant pixel."""
    weight = observation.gradients[tokenizer.weight].flatten(1).to(torch.float64)
    bias = observation.gradients.get(tokenizer.bias) if tokenizer.bias else None
    return weight if bias is None else torch.cat([weight, bias.to(torch.float64)[:, None]], dim=1)


def _span(rest: Tensor, hidden: int, round_off: float) -> tuple[float, Tensor]:
    """Noise of one entry of R, and F (k, P + 1) with F^T F = R^T R / (rows of R) over the directions above the noise.

    Args:
        rest: R, (D - r, P + 1).
        hidden: |M|, the most directions that R can have.
        round_off: noise to assume where R has no directions to spare.
    """
    if not len(rest):
        return round_off, rest
    _, sizes, right = torch.linalg.svd(rest, full_matrices=False)  # descending, rows
    spare = (len(rest) - hidden) * (rest.shape[1] - hidden)
    level = float((sizes[hidden:].square().sum() / spare).sqrt()) if len(rest) > hidden and spare > 0 else round_off
    edge = EDGE * level * (len(rest) ** 0.5 + rest.shape[1] ** 0.5)
    kept = int((sizes[:hidden] > edge).sum())
    return level, sizes[:kept, None] * right[:kept] / len(rest) ** 0.5


def _condition(
    guess: Tensor, solved: Tensor, factors: Tensor, masked: Tensor, patch_dim: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Use the constant pixel: rows, basis, sizes of the errors along it, and the scale of a masked patch."""
    patches = factors[:, :patch_dim]  # (k, P)
    if factors.shape[1] == patch_dim:  # no bias: nothing says how large a masked patch is; a pixel's variance is 1
        centre, schur, masked_scale, offset = 0.0, patches, float(patch_dim**0.5 / patches.norm()), None
    else:
        constant = factors[:, -1:]  # (k, 1)
        power = constant.square().sum()  # T_cc
        centre = (constant * patches).sum(dim=0) / power  # m, (P,)
        schur = patches - constant * centre
        masked_scale = float(power.rsqrt())
        offset = guess.new_full((len(guess), 1), -1.0)
        offset[~masked] = solved[:, -1:] - 1
    rows = guess if offset is None else guess - offset * centre
    _, sizes, basis = torch.linalg.svd(schur, full_matrices=False)
    kept = len(factors) - (offset is not None)
    return rows, basis[:kept], sizes[:kept], masked_scale
