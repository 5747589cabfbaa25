"""From solved equations to an image: a prior settles what they leave open, and each patch is vouched for or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.confidence import RIGHT_DB, probabilities, surest
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.normal_equations import Estimate
from attacks.observation import Observation, Reconstruction
from attacks.tokenizer import Tokenizer

# Rms error, in [0, 1], of a patch at `RIGHT_DB`.
VOUCHED_DEVIATION = 10 ** (-RIGHT_DB / 20)


@dataclass(frozen=True)
class Completed:
    """Every patch of an image, its open directions settled.

    Attributes:
        patches: (N, P) float64, normalised pixels.
        probability: (N,) in [0, 1], that the patch is above `RIGHT_DB`.
    """

    patches: Tensor
    probability: Tensor

    @property
    def vouched(self) -> Tensor:
        """(N,) bool: as many patches as are expected to be right, the surest first."""
        return surest(self.probability)


def complete(
    prior: VectorialVariation,
    estimate: Estimate,
    tokenizer: Tokenizer,
    std: tuple[float, ...],
    shown: Tensor,
    *,
    updates: int,
) -> Completed:
    """Settle the open directions of an estimate.

    Args:
        std: per-channel normalisation of the inputs.
        shown: (N,) bool, patches that at least one update shows.
        updates: number of updates whose equations the estimate solves.
    """
    settled = prior.settle(estimate, tokenizer, std)
    return Completed(settled.patches, probabilities(settled, shown, tokenizer, several=updates > 1))


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
