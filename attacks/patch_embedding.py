"""Closed-form inversion of the patch projection, on any unmodified ViT with a learnable additive position embedding.

Tokens are z_i = E x_i + b + e_i. With g_i = dL/dz_i the same update holds both dL/de_i = g_i (a row each) and
dL/dE = sum_i g_i x_i^T = G^T X. G and dL/dE are known, X is not: N unknown rows in D equations a pixel. No weights, no
labels and no change to the architecture are needed. Where N > D, or the network's last norm takes a direction away, a
few combinations of rows stay free; they are chosen so that the image has the least total variation.

The idea that position gradients open the door is APRIL's (Lu et al. 2021); inverting the projection instead of the
attention is a step further: it holds on pre-norm blocks, where APRIL's equation does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attacks.affine import RowSolution
from attacks.base import ATTACKS
from attacks.closed_form import ClosedForm, Equation
from attacks.priors import least_variation
from attacks.tokenizer import Tokenizer


@ATTACKS.register("patch_embedding")
@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(ClosedForm):
    """Solve G^T X = dL/dE for the patches X.

    Args:
        rcond: singular values of G below this share of the largest are taken for round-off; None fits the type of the
            gradients.
        complete: settle free directions by least total variation (else they are left at least norm).
        max_free: most free directions that total variation is asked to settle; more say too little about the image.
    """

    rcond: float | None = None
    complete: bool = True
    max_free: int = 32

    def equation(self, model: nn.Module, tokenizer: Tokenizer) -> Equation:
        """dL/dE, patch rows only: prefix tokens pass no projection."""
        return Equation(
            first=tokenizer.prefix,
            products=lambda gradients: gradients[tokenizer.weight].flatten(1),  # (D, P)
            patches=lambda rows: rows,
            rcond=self.rcond,
        )

    def settle(self, solution: RowSolution, tokenizer: Tokenizer, reasons: list[str]) -> Tensor:
        """Rows (N, P) with the free directions settled, where the system holds and leaves few of them."""
        free = solution.free.shape[1]
        if free == 0 or reasons or not self.complete:
            return solution.rows
        if free > self.max_free:
            reasons.append(
                f"only {solution.rank} of {len(solution.rows)} directions of the position gradient rise above "
                "round-off: too many combinations of patches stay free"
            )
            return solution.rows
        start = solution.rows.new_zeros(free, tokenizer.patch_dim)
        coefficients = least_variation(lambda c: tokenizer.unpatchify((solution.rows + solution.free @ c)[None]), start)
        return solution.rows + solution.free @ coefficients
