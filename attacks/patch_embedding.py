"""Closed-form inversion of the patch projection, on any unmodified ViT with a learnable additive position embedding.

Tokens are z_i = E x_i + b + e_i. With g_i = dL/dz_i the same update holds both dL/de_i = g_i (a row each) and
dL/dE = sum_i g_i x_i^T = G^T X. G and dL/dE are known, X is not: N unknown rows in D equations a pixel. No weights, no
labels and no change to the architecture are needed. Where N > D, or the network's last norm takes a direction away, a
few combinations of rows stay free; they are chosen so that the image has the least total variation.

The idea that position gradients open the door is APRIL's (Lu et al. 2021); inverting the projection instead of the
attention is a step further: it holds on pre-norm blocks, where APRIL's equation does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attacks.affine import RowSolution, solve_rows
from attacks.base import ATTACKS, Attack
from attacks.observation import Capability, Observation, Reconstruction
from attacks.priors import least_variation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


def unmet_assumptions(observation: Observation, masked: Tensor) -> list[str]:
    """Why a closed form for one image and one step does not fit this update, in words; empty where it does.

    Args:
        masked: (N,) bool, position rows that are exactly zero.
    """
    reasons = []
    if observation.num_examples > 1:
        reasons.append(
            f"the batch holds {observation.num_examples} images: their gradients add up and the solve returns a mixture"
        )
    if observation.local_steps > 1:
        reasons.append(
            f"the update sums {observation.local_steps} local steps: several batches and changing weights are mixed "
            "in it"
        )
    if masked.any():
        reasons.append(
            f"{int(masked.sum())} of {len(masked)} position rows are exactly zero: those patches hide behind a shared "
            "position embedding (MJP) and spoil the solve of the others"
        )
    return reasons


def position_rows(observation: Observation, tokenizer: Tokenizer) -> Tensor | None:
    """Position gradient with its prefix rows, (prefix + N, D), or None where the update holds none (or only zeros)."""
    gradient = observation.gradients.get(tokenizer.positions) if tokenizer.positions else None
    return None if gradient is None or not gradient.any() else gradient.reshape(-1, tokenizer.width)


def missing_positions(tokenizer: Tokenizer) -> str:
    """Why there are no position rows, in words."""
    if tokenizer.positions is None:
        return "the model has no learnable position embedding, so the update holds no gradient per token to solve with"
    return (
        f"the update holds no gradient of {tokenizer.positions} (frozen or withheld), so there is nothing to solve with"
    )


@ATTACKS.register("patch_embedding")
@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(Attack):
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

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds rank, condition, residual, free directions and masked rows."""
        observation = observations[-1]
        try:
            tokenizer = find_tokenizer(observation.model, observation.image_shape)
        except UsageError as error:
            return Reconstruction(images=None, diagnosis=str(error))
        rows = position_rows(observation, tokenizer)
        if rows is None:
            return Reconstruction(images=None, diagnosis=missing_positions(tokenizer))

        factors = rows[tokenizer.prefix :]  # (N, D)
        masked = factors.abs().amax(dim=1) == 0  # (N,)
        reasons = unmet_assumptions(observation, masked)
        products = observation.gradients[tokenizer.weight].flatten(1)  # (D, P)
        solution = solve_rows(factors[~masked], products, rcond=self.rcond)
        visible = self._complete(solution, tokenizer, exact=not reasons)
        patches = visible.new_zeros(tokenizer.num_patches, tokenizer.patch_dim)
        patches[~masked] = visible
        if solution.free.shape[1] > self.max_free:
            reasons.append(
                f"only {solution.rank} of {len(solution.rows)} directions of the position gradient rise above "
                "round-off: too many combinations of patches stay free"
            )
        images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
        known = torch.full_like(images[:, :1], not reasons, dtype=torch.bool)
        details = {
            "rank": solution.rank,
            "condition": solution.condition,
            "residual": solution.residual,
            "free": solution.free.shape[1],
            "masked": int(masked.sum()),
        }
        batch = (observation.num_examples, -1, -1, -1)
        return Reconstruction(images.expand(batch), known.expand(batch), diagnosis="; ".join(reasons), details=details)

    def _complete(self, solution: RowSolution, tokenizer: Tokenizer, *, exact: bool) -> Tensor:
        """Rows (N, P) with the free directions settled, where the system holds and leaves few of them."""
        free = solution.free.shape[1]
        if not (self.complete and exact and 0 < free <= self.max_free):
            return solution.rows
        start = solution.rows.new_zeros(free, tokenizer.patch_dim)
        coefficients = least_variation(lambda c: tokenizer.unpatchify((solution.rows + solution.free @ c)[None]), start)
        return solution.rows + solution.free @ coefficients
