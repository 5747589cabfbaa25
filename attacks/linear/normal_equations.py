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
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A direction is open where its standard deviation exceeds this share of a normalised pixel's (about 1).
SETTLED = 1e-2
# Eigenvalues below this share of the total weight are round-off of the accumulation.
NEGLIGIBLE = 1e-11
# Eigenvalues below this multiple of the bias that tilted bases cause count as zero.
LEAST_OVER_TILT_BIAS = 4.0
# Noise of one equation where the misfit of the updates cannot show it (one update always fits): float32 round-off.
DEFAULT_NOISE = 1e-6


@dataclass(frozen=True)
class Estimate:
    """The solution of the equations for N patches.

    Attributes:
        rows: (N, P) float64, the settled part; nothing along `open`.
        open: (k, P) orthonormal, the directions that the equations leave open for every patch.
        centre: (N, k) best guess of the coefficients along `open` (0 where nothing is known).
        precision: (k,), or (N, k) where patches differ: inverse variance of `centre`, 0 where nothing is known.
        noise: standard deviation of an equation of weight 1, in units of a normalised pixel.
        residual: relative misfit of the equations at the estimate: near 0 where the updates show one image.
    """

    rows: Tensor
    open: Tensor
    centre: Tensor
    precision: Tensor
    noise: float
    residual: float

    def patches(self, coefficients: Tensor | None = None) -> Tensor:
        """(N, P) with `coefficients` (N, k) along the open directions; by default the centre."""
        return self.rows + (self.centre if coefficients is None else coefficients) @ self.open


class NormalEquations:
    """Accumulator of the equations of any number of updates that show the same image.

    Args:
        num_patches: N.
        patch_dim: P.
        device: of the sums.
    """

    def __init__(self, num_patches: int, patch_dim: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(patch_dim, patch_dim, dtype=torch.float64, device=device)  # H, (P, P)
        self.targets = torch.zeros(num_patches, patch_dim, dtype=torch.float64, device=device)  # r, (N, P)
        self.tilts = torch.zeros_like(self.matrix)  # F, (P, P)
        self.squares = torch.zeros(num_patches, dtype=torch.float64, device=device)  # q, (N,)
        self.weight = 0.0
        self.updates = 0
        self.equations = 0  # equations a patch

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
        self.matrix.diagonal().add_(weight)
        self.matrix -= weight * (basis.T @ basis)
        if tilt is not None:
            self.tilts += weight * (basis.T * tilt.to(basis)) @ basis
        self.targets += weight * kept
        self.squares += weight * kept.square().sum(dim=1)
        self.weight += weight
        self.updates += 1
        self.equations += rows.shape[1] - len(basis)

    def merge(self, other: NormalEquations) -> None:
        """Add all updates of another accumulator of the same shape.

        Raises:
            ValueError: shapes that do not fit.
        """
        if other.targets.shape != self.targets.shape:
            raise ValueError(f"{tuple(other.targets.shape)} does not fit {tuple(self.targets.shape)}")
        for name in ("matrix", "tilts", "targets", "squares"):
            getattr(self, name).add_(getattr(other, name))
        for name in ("weight", "updates", "equations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def misfit(self, patches: Tensor) -> Tensor:
        """sum_t w_t |P_t (x_p - l_t,p)|^2 of given patches (N, P), as (N,)."""
        x = patches.to(self.targets)
        return ((x @ self.matrix - 2 * self.targets) * x).sum(dim=1) + self.squares

    def solve(self, noise: float | None = None) -> Estimate:
        """Solve, by one eigendecomposition.

        Args:
            noise: standard deviation of an equation of weight 1; by default estimated from the misfit of the
                updates (one update alone always fits: round-off is assumed).

        Raises:
            ValueError: no update was added.
        """
        if not self.updates:
            raise ValueError("no update was added")
        values, vectors = torch.linalg.eigh(self.matrix)  # (P,) ascending, (P, P)
        along = self.targets @ vectors  # (N, P): r_p v_j
        tilt_bias = ((self.tilts @ vectors) * vectors).sum(dim=0)  # (P,): v_j F v_j
        observed = values > torch.clamp(LEAST_OVER_TILT_BIAS * tilt_bias, min=NEGLIGIBLE * self.weight)
        # The best fit of all, for the noise estimate; what an untrusted direction explains is not noise.
        fitted = values > NEGLIGIBLE * self.weight
        centre = torch.where(fitted, along / values.clamp(min=NEGLIGIBLE * self.weight), 0.0)
        misfit = (self.squares - (along * centre).sum(dim=1)).clamp(min=0).sum()
        centre = torch.where(observed, centre, 0.0)
        if noise is None:
            surplus = max(self.equations - int(fitted.sum()), 1)  # equations beyond the unknowns
            noise = max(float(misfit / len(centre) / surplus) ** 0.5, DEFAULT_NOISE)
        precision = torch.where(observed, values / noise**2, 0.0)  # (P,)
        open_ = precision < SETTLED**-2
        return Estimate(
            rows=centre[:, ~open_] @ vectors[:, ~open_].T,
            open=vectors[:, open_].T.contiguous(),
            centre=centre[:, open_],
            precision=precision[open_],
            noise=noise,
            residual=float((misfit / self.squares.sum().clamp(min=1e-300)).sqrt()),
        )
