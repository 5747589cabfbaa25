"""Normal equations of any number of updates that show the same image: constant memory, updates in any order.

An update t gives for every patch x_p (P,) of its image

    P_t (x_p - l_t,p) = 0,        P_t = I - B_t^T B_t,

with l_t,p (P,) the row that the update's linear solve gives for the patch and B_t (k, P) an orthonormal basis of the
directions along which that solve is wrong. `attacks.linear.masked_update` derives both for one image with masked
positions; for a batch whose position rows add up, B_t spans the differences of the images. P_t is the same for all
patches of one update, so

    H = sum_t w_t P_t  (P, P),    r_p = sum_t w_t l_t,p P_t  (P,),    q_p = sum_t w_t l_t,p P_t l_t,p

hold everything that T updates give: sum_t w_t |P_t (x_p - l_t,p)|^2 = x_p H x_p - 2 r_p x_p + q_p. Memory does not grow
with T, the weights of the network may change in between, and the sum of two accumulators is the accumulator of both.
One eigendecomposition H = V diag(lambda) V^T solves for all patches at once: along v_j the estimate is r_p v_j /
lambda_j, with variance sigma^2 / lambda_j where sigma is the noise of one equation. Directions whose variance is not
small against that of a pixel are *open*: every update hides them, or nearly. They are not cut off but returned with
what is known of them, for an image prior to settle over all patches jointly:

    minimise over c:  sum_p sum_j  lambda_j / sigma^2 (c_pj - r_p v_j / lambda_j)^2  +  prior(rows + c V_open).

Noise turns a basis B_t out of the true span, and so gives a direction that every update hides a small eigenvalue that
it should not have. That bias is accumulated beside H, F = sum_t w_t B_t^T diag(sin^2 tilt) B_t; where v_j H v_j does
not exceed v_j F v_j clearly, the direction counts as unobserved.

*Other coordinates.* An update of a mirrored, shifted or recoloured image gives equations for patches x' that follow
from the target's by one affine map for all patches, x' = M x + k, and a renumbering of their places. They become
equations for x: H = M^T H' M, r = (r' - k H') M, q = q' - 2 r' k + k H' k. A place that the update's image does not
hold gets none of them, so that H may differ between patches: it is kept once for each set of patches that have all
their equations in common (a *part*).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# A direction is open where its standard deviation exceeds this share of a normalised pixel's (about 1).
SETTLED = 1e-2
# Largest inverse variance of a direction that is settled for some patches and open for others, for the prior's sake.
LARGEST_PRECISION = 1e9
# Eigenvalues below this share of the total weight are round-off of the accumulation.
NEGLIGIBLE = 1e-11
# Eigenvalues below this multiple of the bias that tilted bases cause count as zero.
LEAST_OVER_TILT_BIAS = 4.0
# Singular values below which open directions of different parts count as the same.
SAME_DIRECTION = 1e-6
# Noise of one equation where the misfit of the updates cannot show it (one update always fits): float32 round-off.
DEFAULT_NOISE = 1e-6


@dataclass(frozen=True)
class Estimate:
    """The solution of the equations for N patches.

    Attributes:
        rows: (N, P) float64, the settled part; nothing along `open`.
        open: (k, P) orthonormal, the directions that the equations leave open for every patch.
        centre: (N, k) best guess of the coefficients along `open` (0 where nothing is known).
        precision: inverse variance of `centre`, 0 where nothing is known: (k,), or (N, k) where patches differ, or the
            inverse covariance (N, k, k) where patches with different equations share the open directions.
        noise: standard deviation of an equation of weight 1, in units of a normalised pixel.
        residual: relative misfit of the equations at the estimate: near 0 where the updates show one image.
    """

    rows: Tensor
    open: Tensor
    centre: Tensor
    precision: Tensor
    noise: float
    residual: float

    def settled(self) -> Tensor:
        """(N,) bool, patches of which the equations alone settle every direction."""
        if self.precision.dim() < 3:
            least = self.precision.expand(len(self.rows), -1)
        else:
            least = torch.linalg.eigvalsh(self.precision)
        return (least > SETTLED**-2).all(dim=1)

    def patches(self, coefficients: Tensor | None = None) -> Tensor:
        """(N, P) with `coefficients` (N, k) along the open directions; by default the centre."""
        return self.rows + (self.centre if coefficients is None else coefficients) @ self.open


@dataclass
class Part:
    """The sums of the patches that have all their equations in common.

    Attributes:
        members: (N,) bool, the patches.
        matrix, tilts: H and F, (P, P).
        weight: sum of the updates' weights.
        equations: of a patch.
    """

    members: Tensor
    matrix: Tensor
    tilts: Tensor
    weight: float = 0.0
    equations: int = 0

    def plus(self, other: Part) -> Part:
        """The sums of both, for the patches that are in both."""
        return Part(
            self.members & other.members,
            self.matrix + other.matrix,
            self.tilts + other.tilts,
            self.weight + other.weight,
            self.equations + other.equations,
        )


@dataclass(frozen=True)
class _Solved:
    """One part, solved.

    Attributes:
        part: the sums.
        values, vectors: of H, (P,) ascending and (P, P).
        observed: (P,) bool, eigenvalues that say something.
        centre: (n, P) estimate along the vectors, 0 where nothing is observed.
        misfit: of the best fit, weighted.
        surplus: equations of a patch beyond its unknowns.
    """

    part: Part
    values: Tensor
    vectors: Tensor
    observed: Tensor
    centre: Tensor
    misfit: float
    surplus: int

    def precision(self, noise: float) -> Tensor:
        """(P,) inverse variance along the vectors."""
        return torch.where(self.observed, self.values / noise**2, 0.0)


class NormalEquations:
    """Accumulator of the equations of any number of updates that show the same image.

    Args:
        num_patches: N.
        patch_dim: P.
        device: of the sums.
    """

    def __init__(self, num_patches: int, patch_dim: int, device: torch.device | str = "cpu") -> None:
        nothing = torch.zeros(patch_dim, patch_dim, dtype=torch.float64, device=device)
        everything = torch.ones(num_patches, dtype=torch.bool, device=device)
        self.parts = [Part(everything, nothing, nothing)]
        self.targets = torch.zeros(num_patches, patch_dim, dtype=torch.float64, device=device)  # r, (N, P)
        self.squares = torch.zeros(num_patches, dtype=torch.float64, device=device)  # q, (N,)
        self.updates = 0

    def add(self, rows: Tensor, basis: Tensor, weight: float = 1.0, tilt: Tensor | None = None) -> None:
        """Add one update.

        Args:
            rows: l, (N, P), normalised pixels; any value along `basis`.
            basis: B, (k, P) with orthonormal rows; k may be 0.
            weight: inverse variance of the equations, up to a factor common to all updates (see `Estimate.noise`).
            tilt: (k,) expected squared sine of the angle between each row of `basis` and the true span; None for 0.

        Raises:
            ValueError: shapes that do not fit.
        """
        if rows.shape != self.targets.shape or basis.shape[1:] != rows.shape[1:]:
            raise ValueError(f"rows {tuple(rows.shape)} and basis {tuple(basis.shape)} do not fit {self.targets.shape}")
        rows, basis = rows.to(self.targets), basis.to(self.targets)
        kept = rows - (rows @ basis.T) @ basis  # l P, (N, P)
        matrix = -weight * (basis.T @ basis)
        matrix.diagonal().add_(weight)
        self.add_sums(matrix, weight * kept, weight * kept.square().sum(dim=1), weight, rows.shape[1] - len(basis))
        if tilt is not None:
            bias = weight * (basis.T * tilt.to(basis)) @ basis
            self.parts = [replace(part, tilts=part.tilts + bias) for part in self.parts]

    def add_sums(self, matrix: Tensor, targets: Tensor, squares: Tensor, weight: float, equations: int) -> None:
        """Add one update whose equations are weighted one by one: x H x - 2 r x + q for every patch.

        Args:
            matrix, targets, squares: H (P, P), r (N, P), q (N,).
            weight: largest weight of an equation; eigenvalues that are negligible against it are round-off.
            equations: of a patch.
        """
        everything = torch.ones_like(self.squares, dtype=torch.bool)
        added = Part(everything, matrix.to(self.targets), torch.zeros_like(matrix), weight, equations)
        self.parts = [part.plus(added) for part in self.parts]
        self.targets = self.targets + targets
        self.squares = self.squares + squares
        self.updates += 1

    def transformed(self, linear: Tensor, constant: Tensor) -> NormalEquations:
        """The equations for patches x of which the ones here are M x + k.

        Args:
            linear: M, (P, P).
            constant: k, (P,).
        """
        found = NormalEquations(*self.targets.shape, device=self.targets.device)
        scale = float(linear.square().sum() / len(linear))
        found.parts = [
            replace(
                part,
                matrix=linear.T @ part.matrix @ linear,
                tilts=linear.T @ part.tilts @ linear,
                weight=part.weight * scale,
            )
            for part in self.parts
        ]
        pulled = torch.empty_like(self.targets)  # k H', (N, P)
        for part in self.parts:
            pulled[part.members] = constant @ part.matrix
        found.targets = (self.targets - pulled) @ linear
        found.squares = self.squares - (2 * self.targets - pulled) @ constant
        found.updates = self.updates
        return found

    def renumbered(self, source: Tensor) -> NormalEquations:
        """The equations at other places.

        Args:
            source: (N,) for each patch its number here, or -1 where it is none of these and has no equation.
        """
        found = NormalEquations(*self.targets.shape, device=self.targets.device)
        covered = source >= 0
        nothing = torch.zeros_like(self.parts[0].matrix)
        parts = [replace(part, members=covered & part.members[source]) for part in self.parts]
        found.parts = [part for part in (*parts, Part(~covered, nothing, nothing)) if part.members.any()]
        found.targets = torch.where(covered[:, None], self.targets[source], 0.0)
        found.squares = torch.where(covered, self.squares[source], 0.0)
        found.updates = self.updates
        return found

    def merge(self, other: NormalEquations) -> None:
        """Add all updates of another accumulator of the same shape.

        Raises:
            ValueError: shapes that do not fit.
        """
        if other.targets.shape != self.targets.shape:
            raise ValueError(f"{tuple(other.targets.shape)} does not fit {tuple(self.targets.shape)}")
        both = (part.plus(added) for part in self.parts for added in other.parts)
        self.parts = [part for part in both if part.members.any()]
        self.targets, self.squares = self.targets + other.targets, self.squares + other.squares
        self.updates += other.updates

    def misfit(self, patches: Tensor) -> Tensor:
        """sum_t w_t |P_t (x_p - l_t,p)|^2 of given patches (N, P), as (N,)."""
        x, found = patches.to(self.targets), self.squares.clone()
        for part in self.parts:
            own = x[part.members]
            found[part.members] += ((own @ part.matrix - 2 * self.targets[part.members]) * own).sum(dim=1)
        return found

    def solve(self, noise: float | None = None) -> Estimate:
        """Solve, by one eigendecomposition a part.

        Args:
            noise: standard deviation of an equation of weight 1; by default estimated from the misfit of the
                updates (one update alone always fits: round-off is assumed).

        Raises:
            ValueError: no update was added.
        """
        if not self.updates:
            raise ValueError("no update was added")
        solved = list(self._solved())
        misfit = sum(one.misfit for one in solved)
        if noise is None:
            freedom = sum(int(one.part.members.sum()) * one.surplus for one in solved)
            noise = max((misfit / freedom) ** 0.5, DEFAULT_NOISE)
        residual = (misfit / float(self.squares.sum().clamp(min=1e-300))) ** 0.5
        if len(solved) > 1:
            return self._combined(solved, noise, residual)
        one = solved[0]
        precision = one.precision(noise)  # (P,)
        open_ = precision < SETTLED**-2
        return Estimate(
            rows=one.centre[:, ~open_] @ one.vectors[:, ~open_].T,
            open=one.vectors[:, open_].T.contiguous(),
            centre=one.centre[:, open_],
            precision=precision[open_],
            noise=noise,
            residual=residual,
        )

    def _solved(self) -> Iterator[_Solved]:
        """Every part by itself."""
        for part in self.parts:
            values, vectors = torch.linalg.eigh(part.matrix)
            along = self.targets[part.members] @ vectors  # (n, P): r_p v_j
            tilt_bias = ((part.tilts @ vectors) * vectors).sum(dim=0)  # (P,): v_j F v_j
            least = NEGLIGIBLE * part.weight
            observed = values > torch.clamp(LEAST_OVER_TILT_BIAS * tilt_bias, min=least)
            # The best fit of all, for the noise estimate; what an untrusted direction explains is not noise.
            fitted = values > least
            centre = torch.where(fitted, along / values.clamp(min=max(least, 1e-300)), 0.0)
            misfit = float((self.squares[part.members] - (along * centre).sum(dim=1)).clamp(min=0).sum())
            surplus = max(part.equations - int(fitted.sum()), 1)
            yield _Solved(part, values, vectors, observed, torch.where(observed, centre, 0.0), misfit, surplus)

    def _combined(self, solved: list[_Solved], noise: float, residual: float) -> Estimate:
        """Parts together: a direction that one of them leaves open is open for all, at each one's own precision."""
        opened = [one.vectors[:, one.precision(noise) < SETTLED**-2] for one in solved]
        left, sizes, _ = torch.linalg.svd(torch.cat(opened, dim=1), full_matrices=False)
        open_ = left[:, sizes > SAME_DIRECTION].T.contiguous()  # (k, P)
        patches = torch.zeros_like(self.targets)
        precision = self.targets.new_zeros(len(patches), len(open_), len(open_))
        for one in solved:
            patches[one.part.members] = one.centre @ one.vectors.T
            turned = open_ @ one.vectors
            precision[one.part.members] = (turned * one.precision(noise).clamp(max=LARGEST_PRECISION)) @ turned.T
        centre = patches @ open_.T
        return Estimate(patches - centre @ open_, open_, centre, precision, noise, residual)
