"""APRIL's closed form (Lu et al. 2021, "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers").

For a first block that reads the tokens z directly (no norm before the attention, no residual around it),
W_q^T dW_q + W_k^T dW_k + W_v^T dW_v = sum_i g_i z_i^T (its equation 6), and g_i is the position gradient. Solve for z,
subtract the position embedding, invert the patch projection (by its pseudo-inverse: with D < P this keeps the part of a
patch inside the projection's row space only).

The same arithmetic as the `breaching` package's AprilAttacker, which is the parity check: float64, singular values kept
down to float64 round-off. float32 gradients and a badly conditioned G then cost most of the fidelity; `details` says
how badly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.attention import FirstAttention, find_first_attention
from attacks.closed_form.base import ClosedForm, Equation, System
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.least_squares import RowSolution
from attacks.observation import Capability, Observation
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer, find_tokenizer


@dataclass(frozen=True, kw_only=True)
class April(ClosedForm):
    """APRIL's analytic attack on the first attention layer."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: on a block that normalises its input APRIL's equation does not hold."""
        target = observations[-1]
        try:
            width = find_tokenizer(target.model, target.image_shape).width
            norm = find_first_attention(target.model, width).norm
        except UsageError as error:
            return str(error)
        return f"the first block normalises its input ({norm}): APRIL's equation does not hold there" if norm else ""

    def linear_layers(self, model: nn.Module, width: int) -> tuple[str, ...]:
        """Query, key and value of the first attention."""
        try:
            return find_first_attention(model, width).weights
        except UsageError:
            return ()

    def equation(self, model: nn.Module, tokenizer: Tokenizer) -> Equation:
        """The first attention's system over all tokens, prefix included."""
        attention = find_first_attention(model, tokenizer.width)
        weights = {n: p.detach().double() for n, p in model.named_parameters() if n in _read_by(attention, tokenizer)}
        projection = weights[tokenizer.weight].flatten(1)  # E, (D, P)
        # pinv(E)^T by the symmetric problem: a tenth of the time, and float64 has digits to spare.
        inverse = torch.linalg.pinv(projection @ projection.T, hermitian=True) @ projection  # (D, P)
        offset = tokenizer.position_rows(weights)[tokenizer.prefix :]
        if tokenizer.bias:
            offset = offset + weights[tokenizer.bias]  # (N, D)
        caveat = (
            f"the first block normalises its input ({attention.norm}): APRIL's equation does not hold there "
            "(use --block april)"
        )
        return Equation(
            first=0,
            products=lambda observation: _products(weights, observation, attention),
            patches=lambda rows: (rows[tokenizer.prefix :] - offset) @ inverse,
            rcond=torch.finfo(torch.float64).eps * max(tokenizer.num_patches + tokenizer.prefix, tokenizer.width),
            caveats=(caveat,) if attention.norm else (),
        )

    def settle(
        self, solution: RowSolution, system: System, observation: Observation, reasons: list[str]
    ) -> tuple[Tensor, Tensor | None]:
        """See `ClosedForm.settle`: rows as solved.

        Vouched for are patches that tokens determine (no fewer channels than a patch has values, no free combination of
        tokens) and whose error by the noise of the message is small.
        """
        tokenizer, gains = system.tokenizer, solution.gains[system.tokenizer.prefix :]
        if tokenizer.width < tokenizer.patch_dim or solution.rank < len(solution.rows):
            return solution.rows, torch.zeros_like(gains, dtype=torch.bool)
        projection = dict(observation.model.named_parameters())[tokenizer.weight].detach().double().flatten(1)
        inverse = torch.linalg.svdvals(projection).reciprocal().square().mean().sqrt()  # rms of a pixel for noise of 1
        scale = sum(observation.std) / len(observation.std)
        return solution.rows, solution.noise * gains.sqrt() * inverse * scale < VOUCHED_DEVIATION


def _read_by(attention: FirstAttention, tokenizer: Tokenizer) -> set[str | None]:
    return {*attention.weights, tokenizer.weight, tokenizer.bias, tokenizer.positions}


def _products(weights: Mapping[str, Tensor], observation: Observation, attention: FirstAttention) -> Tensor:
    """Sum of W^T dW over query, key and value, (D, D) float64."""
    return sum(weights[n].T @ observation.gradient_of(n).double() for n in attention.weights)
