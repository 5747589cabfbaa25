"""Closed-form inversion of the patch projection, on any unmodified ViT with a learnable additive position embedding.

Tokens are z_i = E x_i + b + e_i. With g_i = dL/dz_i the same update holds both dL/de_i = g_i (a row each) and
dL/dE = sum_i g_i x_i^T = G^T X. G and dL/dE are known, X is not: N unknown rows in D equations a pixel. No weights, no
labels and no change to the architecture are needed. Where N > D, or the network's last norm takes a direction away, a
few combinations of rows stay free; where G is badly conditioned or the gradient noisy, more are known badly. An image
prior settles them.

The use of position gradients is APRIL's (Lu et al. 2021); inverting the projection instead of the attention is a step
further: it holds on pre-norm blocks, where APRIL's equation does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from attacks.closed_form.base import ClosedForm, Equation
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.least_squares import RowSolution
from attacks.linear.null_space import settle_rows
from attacks.linear.position_rows import projection_gradient
from attacks.observation import Observation
from attacks.tokenizer import Tokenizer

# Below this share of combinations known better than a pixel's own spread, the image is more the prior's than the
# update's.
LEAST_KNOWN = 0.5
# Share of dL/dE that the solution may leave unexplained: float32 leaves 1e-6, half precision 1e-3.
LARGEST_RESIDUAL = 0.05
# Weight of the prior against noisy combinations: of 10, 20, 40 and 80 the best two on six ImageNet photographs (april
# block, float32). Where combinations are free and nothing is noisy it makes no difference.
STRENGTH = 40.0


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(ClosedForm):
    """Solve G^T X = dL/dE for the patches X.

    Args:
        prior: settles what the equations leave open.
    """

    prior: VectorialVariation = field(default_factory=lambda: VectorialVariation(strength=STRENGTH))

    def equation(self, model: nn.Module, tokenizer: Tokenizer) -> Equation:
        """dL/dE, patch rows only: prefix tokens pass no projection."""
        return Equation(
            first=tokenizer.prefix,
            products=lambda observation: projection_gradient(observation, tokenizer),  # (D, P)
            patches=lambda rows: rows,
        )

    def settle(
        self, solution: RowSolution, tokenizer: Tokenizer, observation: Observation, reasons: list[str]
    ) -> Tensor:
        """Rows (N, P), the weak combinations settled where the system holds."""
        if reasons:
            return solution.rows
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
        return settle_rows(solution, tokenizer, observation.std, self.prior)
