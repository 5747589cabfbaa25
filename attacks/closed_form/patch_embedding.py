"""Closed-form inversion of the patch projection, on any unmodified ViT with a learnable additive position embedding.

Tokens are z_i = E x_i + b + e_i. With g_i = dL/dz_i the same update holds both dL/de_i = g_i (a row each) and
dL/dE = sum_i g_i x_i^T = G^T X. G and dL/dE are known, X is not: N unknown rows in D equations a pixel. No weights, no
labels and no change to the architecture are needed. Where N > D, or the network's last norm takes a direction away, a
few combinations of rows stay free; where G is badly conditioned or the gradient noisy, more are known badly. An image
prior settles them.

Nor does the number of steps matter, as long as all are on one image: with the weights moving between k local steps of
SGD, sum_t dL/dE_t = sum_t G_t^T X = (sum_t G_t)^T X exactly, at any rate. On different images the sum is that of a
batch of k (`attacks.closed_form.batch_step`), and the solution leaves a part of it unexplained, which is how one tells.

The use of position gradients is APRIL's (Lu et al. 2021); inverting the projection instead of the attention is a step
further: it holds on pre-norm blocks, where APRIL's equation does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from attacks.closed_form.base import ClosedForm, Equation, System
from attacks.linear.completion import VOUCHED_DEVIATION, above_noise
from attacks.linear.errors_in_variables import RoundedSystem, correct
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.least_squares import RowSolution
from attacks.linear.null_space import settle_rows
from attacks.linear.position_rows import (
    bounds_of_update,
    projection_gradient,
    projection_products,
    read_position_rows,
    unbalanced,
    unseen_noise,
)
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer

# Below this share of combinations known better than a pixel's own spread, the image is more the prior's than the
# update's.
LEAST_KNOWN = 0.5
# Below this share nothing is vouched for: the prior settles the others, and its guess is not always right (of random
# ViTs of 64 patches up to 3 of 64 were wrong with 48 channels, none with 60).
VOUCHED_KNOWN = 0.9
# Share of dL/dE that the solution may leave unexplained: float32 leaves 1e-6, half precision 1e-3.
LARGEST_RESIDUAL = 0.05
# The same where an update sums local steps. On one image they leave 1e-6 to 7e-4 (two photographs, trained vit_mini_64,
# weights returned in float32 after 2 and 8 steps at rates of 1e-3 to 1e-1), on different photographs 3e-2 and more.
LARGEST_RESIDUAL_OF_STEPS = 5e-3
# Weight of the prior against noisy combinations: of 10, 20, 40 and 80 the best two on six ImageNet photographs (april
# block, float32). Where combinations are free and nothing is noisy it makes no difference.
STRENGTH = 40.0
# In a message of low precision the expected error by equations and prior is too small by this factor, and above such an
# expected error of a pixel in [0, 1], or such a misfit of the equations, nothing is vouched for.
PRIOR_ERROR, LARGEST_DEVIATION, LARGEST_MISFIT = 2.0, 0.2, 4.0


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(ClosedForm):
    """Solve G^T X = dL/dE for the patches X.

    Args:
        prior: settles what the equations leave open.
        intervals: where the message has fewer digits than float32, solve with the error of every entry
            (`attacks.linear.errors_in_variables`); else with one noise level for all.
    """

    prior: VectorialVariation = field(default_factory=lambda: VectorialVariation(strength=STRENGTH))
    intervals: bool = True

    def equation(self, model: nn.Module, tokenizer: Tokenizer) -> Equation:
        """dL/dE, patch rows only: prefix tokens pass no projection."""
        return Equation(
            first=tokenizer.prefix,
            products=lambda observation: projection_gradient(observation, tokenizer),  # (D, P)
            patches=lambda rows: rows,
            adds_up=True,
        )

    def settle(
        self, solution: RowSolution, system: System, observation: Observation, reasons: list[str]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows (N, P), the weak combinations settled where the system holds, and the patches to vouch for."""
        reasons += _different_images(solution, observation.local_steps)
        if reasons:
            return solution.rows, None
        reasons += [reason for reason in _unrelated_rows(observation) if reason not in reasons]
        tokenizer = system.tokenizer
        bounds = bounds_of_update(observation, tokenizer) if self.intervals else None
        if bounds is not None:
            rounded = RoundedSystem(system.factors, bounds[0], projection_products(observation, tokenizer), bounds[1])
            start = settle_rows(solution, tokenizer, observation.std, self.prior)
            return corrected([rounded], start, tokenizer, observation.std, self.prior, reasons)[:2]
        if solution.rank < LEAST_KNOWN * len(solution.rows):
            reasons.append(
                f"only {solution.rank} of {len(solution.rows)} combinations of patches rise above the noise of the "
                "gradient: the rest is the image prior's guess"
            )
        if solution.residual > LARGEST_RESIDUAL:
            reasons.append(
                f"the solution leaves {solution.residual:.0%} of the projection's gradient unexplained: the update is "
                "not the exact gradient of one image (noise, quantisation, or a defence)"
            )
        noisy = read_position_rows(observation).noisy
        if not solution.spare:
            reasons += unseen_noise(noisy)
        sure = _sure(solution, observation.std, noisy=noisy is not False)
        return settle_rows(solution, tokenizer, observation.std, self.prior), sure


def _sure(solution: RowSolution, std: tuple[float, ...], *, noisy: bool) -> Tensor:
    """(N,) bool, the patches to vouch for: by the noise of the message, whatever the prior makes of weak combinations.

    None where a client added noise and no equations are left over to measure it: the error is then not known.

    Args:
        std: per-channel normalisation of the inputs.
        noisy: the update holds more than round-off, or may.
    """
    guessed = solution.rank < VOUCHED_KNOWN * len(solution.rows)
    unmeasured = noisy and not solution.spare
    return above_noise(solution.noise * solution.gains.sqrt(), std) & (not guessed and not unmeasured)


def corrected(
    systems: Sequence[RoundedSystem],
    start: Tensor,
    tokenizer: Tokenizer,
    std: tuple[float, ...],
    prior: VectorialVariation,
    reasons: list[str],
) -> tuple[Tensor, Tensor, float]:
    """Rows (N, P) of systems with the error of every entry, the patches to vouch for, and the misfit of the equations.

    Args:
        start: (N, P), the plain solve's rows.
        reasons: why not to trust the rows; added to.
    """
    found = correct(systems, start, tokenizer, std, prior)
    expected = PRIOR_ERROR * found.deviation
    if float(expected.mean()) > LARGEST_DEVIATION:
        reasons.append(
            "the update has too few digits (noised, rounded, quantised or sparsified): pixels are expected to be off "
            f"by {float(expected.mean()):.2g} of 1"
        )
    if found.misfit > LARGEST_MISFIT:
        reasons.append(
            f"the equations miss each other by {found.misfit**0.5:.1f} times what the update's precision explains: "
            "it is not the gradient of one image (noise, or a defence)"
        )
    return found.patches, expected < VOUCHED_DEVIATION, found.misfit


def _unrelated_rows(observation: Observation) -> list[str]:
    """Why the rows are not the projection's token gradients, in words: their sum misses its bias' gradient.

    With no more channels than patches nothing else can contradict them; with more, all equations hold of rows and
    products that were scaled apart.
    """
    read = read_position_rows(observation)
    if not read.imbalance > LARGEST_RESIDUAL:
        return []
    return unbalanced(read.imbalance, read.rounding)


def _different_images(solution: RowSolution, local_steps: int) -> list[str]:
    """Why the steps that an update sums are not on one image, or not known to be, in words."""
    summed = f"the update sums {local_steps} local steps"
    if local_steps == 1:
        return []
    if not solution.spare:
        return [f"{summed}, and with no more channels than patches it does not show whether all are of one image"]
    if solution.residual > LARGEST_RESIDUAL_OF_STEPS:
        return [
            f"{summed}: several batches and changing weights are mixed in it (one image would explain the projection's "
            f"gradient, and leaves {solution.residual:.0%} of it)"
        ]
    return []
