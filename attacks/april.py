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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attacks.affine import solve_rows
from attacks.base import ATTACKS, Attack
from attacks.observation import Capability, Observation, Reconstruction
from attacks.patch_embedding import missing_positions, position_rows, unmet_assumptions
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# Names under which ViTs keep the norm that stands before the first attention.
PRE_NORMS = ("norm1", "ln_1", "layernorm_before")


@ATTACKS.register("april")
@dataclass(frozen=True, kw_only=True)
class April(Attack):
    """APRIL's analytic attack on the first attention layer."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.MODEL_WEIGHTS})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds condition and residual of the attention's system."""
        observation = observations[-1]
        try:
            tokenizer = find_tokenizer(observation.model, observation.image_shape)
            qkv, pre_norm = _first_attention(observation.model, tokenizer.width)
        except UsageError as error:
            return Reconstruction(images=None, diagnosis=str(error))
        rows = position_rows(observation, tokenizer)
        if rows is None:
            return Reconstruction(images=None, diagnosis=missing_positions(tokenizer))

        weights = dict(observation.model.named_parameters())
        products = sum(w.T @ d for w, d in _per_projection(weights, observation.gradients, qkv))  # (D, D)
        solution = solve_rows(rows, products, rcond=torch.finfo(torch.float64).eps * max(rows.shape))
        positions = weights[tokenizer.positions].detach().double().reshape(-1, tokenizer.width)
        tokens = (solution.rows - positions)[tokenizer.prefix :]  # (N, D)
        if tokenizer.bias:
            tokens = tokens - weights[tokenizer.bias].detach().double()
        projection = weights[tokenizer.weight].detach().double().flatten(1)  # (D, P)
        patches = tokens @ torch.linalg.pinv(projection).T  # (N, P)

        masked = rows[tokenizer.prefix :].abs().amax(dim=1) == 0  # (N,)
        reasons = unmet_assumptions(observation, masked)
        if pre_norm:
            reasons.append(
                f"the first block normalises its input ({pre_norm}): APRIL's equation does not hold there "
                "(use --block april)"
            )
        images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
        known = torch.full_like(images[:, :1], not reasons, dtype=torch.bool)
        details = {"condition": solution.condition, "residual": solution.residual, "masked": int(masked.sum())}
        batch = (observation.num_examples, -1, -1, -1)
        return Reconstruction(images.expand(batch), known.expand(batch), diagnosis="; ".join(reasons), details=details)


def _first_attention(model: nn.Module, width: int) -> tuple[tuple[str, ...], str | None]:
    """Names of the weights of the first attention's q, k and v, and of the norm before it (None without one).

    Raises:
        UsageError: no attention over `width` channels is found.
    """
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and p.shape[1] == width]
    fused = next((n for n in names if n.endswith(("qkv.weight", "in_proj_weight"))), None)
    query = next((n for n in names if n.endswith(("query.weight", "q_proj.weight"))), None)
    first = fused or query
    if first is None:
        raise UsageError(f"no query, key and value projections over {width} channels found in {type(model).__name__}")
    found = (fused,) if fused else tuple(query.replace("query", w).replace("q_proj", w) for w in _siblings(query))
    modules = dict(model.named_modules())
    path = first.split(".")
    blocks = [".".join(path[:i]) for i in range(len(path) - 1, 0, -1)]
    norm = next((f"{b}.{n}" for b in blocks for n in PRE_NORMS if f"{b}.{n}" in modules), None)
    return found, norm


def _siblings(query: str) -> tuple[str, str, str]:
    return ("query", "key", "value") if "query" in query else ("q_proj", "k_proj", "v_proj")


def _per_projection(weights: dict, gradients: dict, names: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """(W, dW), each (D, D) float64, for query, key and value."""
    fused_w = torch.cat([weights[n].detach().double() for n in names])  # (3 D, D)
    fused_d = torch.cat([gradients[n].double() for n in names])
    return list(zip(fused_w.chunk(3), fused_d.chunk(3), strict=True))
