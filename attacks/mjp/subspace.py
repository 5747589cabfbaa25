"""Inversion of one update that hides some positions (Masked Jigsaw Puzzle), by an adversary that knows the defence.

The mask is read off the rows that are exactly zero, the localisation loss is computed and removed
(`attacks.linear.position_rows`), the rest is `attacks.linear.masked_update`: all patches up to a known subspace, with
the size of the error along it. A prior settles that, over visible and masked patches together. Masked patches come back
as what prior and neighbours choose within the span of what was hidden: roughly, and with a confidence that says so.

What it reaches at which gamma: benchmarks/mjp_adaptive.py. From gamma 0.3 on the confidence is too high on the images
that come out worst.

Without a mask it is `patch_embedding` on a model with at most as many patches as channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.linear.image_prior import Settled, VectorialVariation
from attacks.linear.masked_update import HiddenUpdate, read_update, tokenizer_and_rows, why_not
from attacks.linear.normal_equations import Estimate
from attacks.observation import Capability, Observation, Reconstruction
from attacks.tokenizer import Tokenizer

# A patch is vouched for where its pixels are expected to be off by less: 25 dB.
VOUCHED_DEVIATION = 0.056


@dataclass(frozen=True, kw_only=True)
class MJPSubspace(Attack):
    """Whole image from one update with masked positions.

    Args:
        prior: what settles the directions that the update hides.
    """

    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds what `details_of` lists."""
        observation = observations[-1]
        tokenizer, rows = tokenizer_and_rows(observation)
        update = read_update(observation, tokenizer, rows)
        reasons = why_not(observation, update, tokenizer)
        settled = settle(self.prior, update.estimate(), tokenizer, observation, ~update.clean.masked)
        return reconstruction(observation, tokenizer, settled, reasons, details_of(update, settled))


def settle(
    prior: VectorialVariation, estimate: Estimate, tokenizer: Tokenizer, observation: Observation, seen: Tensor
) -> Settled:
    """Complete an estimate; a patch that no update shows (`seen` is (N,) bool) gets the equations' own confidence."""
    settled = prior.settle(estimate, tokenizer, observation.std)
    alone = estimate.deviation() * sum(observation.std) / len(observation.std)
    return replace(settled, deviation=torch.where(seen, settled.deviation, alone))


def details_of(update: HiddenUpdate, settled: Settled) -> dict[str, float]:
    """Masked patches, rank of their span, condition of the visible rows, lambda found, share of patches vouched for."""
    return {
        "masked": int(update.clean.masked.sum()),
        "rank": update.rank,
        "condition": update.condition,
        "dal_weight": update.clean.dal_weight,
        "vouched": float((settled.deviation < VOUCHED_DEVIATION).double().mean()),
    }


def reconstruction(
    observation: Observation, tokenizer: Tokenizer, settled: Settled, reasons: list[str], details: dict[str, float]
) -> Reconstruction:
    """Render settled patches; pixels are known where their patch is expected to be within `VOUCHED_DEVIATION`."""
    images = observation.to_pixels(tokenizer.unpatchify(settled.patches[None])).float()
    sure = (settled.deviation < VOUCHED_DEVIATION) & torch.tensor(not reasons)
    known = sure.reshape(tokenizer.grid).repeat_interleave(tokenizer.patch_size, 0)
    known = known.repeat_interleave(tokenizer.patch_size, 1)[None, None]  # (1, 1, H, W)
    batch = (observation.num_examples, -1, -1, -1)
    return Reconstruction(images.expand(batch), known.expand(batch), diagnosis="; ".join(reasons), details=details)
