"""From solved equations to an image: a prior settles what they leave open, and each patch is vouched for or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attacks.linear.image_prior import Settled, VectorialVariation
from attacks.linear.normal_equations import Estimate
from attacks.observation import Observation, Reconstruction
from attacks.tokenizer import Tokenizer

# A patch is vouched for where its pixels are expected to be off by less: 25 dB.
VOUCHED_DEVIATION = 0.056


def complete(
    prior: VectorialVariation, estimate: Estimate, tokenizer: Tokenizer, std: tuple[float, ...], shown: Tensor
) -> Settled:
    """Settle the open directions of an estimate.

    Args:
        std: per-channel normalisation of the inputs.
        shown: (N,) bool, patches that at least one update shows; the others keep the confidence of the equations alone,
            because the prior's is too high for them.

    Returns:
        Patches (N, P) in normalised pixels, and their expected rms error (N,) in [0, 1] pixels.
    """
    settled = prior.settle(estimate, tokenizer, std)
    alone = estimate.deviation() * sum(std) / len(std)
    return replace(settled, deviation=torch.where(shown, settled.deviation, alone))


def vouched(settled: Settled) -> Tensor:
    """(N,) bool, patches whose pixels are expected to be off by less than `VOUCHED_DEVIATION`."""
    return settled.deviation < VOUCHED_DEVIATION


def render(
    observation: Observation,
    tokenizer: Tokenizer,
    patches: Tensor,
    sure: Tensor,
    diagnosis: str,
    details: Mapping[str, float],
) -> Reconstruction:
    """One image as the answer for every image of the batch.

    Args:
        patches: (N, P) normalised pixels.
        sure: (N,) bool, patches to vouch for; none where there is a diagnosis.
        diagnosis: why not to trust the answer, or "".
    """
    images = observation.to_pixels(tokenizer.unpatchify(patches[None])).float()
    sure = sure & torch.tensor(not diagnosis, device=sure.device)
    known = sure.reshape(tokenizer.grid).repeat_interleave(tokenizer.patch_size, 0)
    known = known.repeat_interleave(tokenizer.patch_size, 1)[None, None]  # (1, 1, H, W)
    batch = (observation.num_examples, -1, -1, -1)
    return Reconstruction(images.expand(batch), known.expand(batch), diagnosis=diagnosis, details=details)
