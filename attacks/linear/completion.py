"""From solved equations to an image: a prior settles what they leave open, and each patch is vouched for or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.linear.confidence import RIGHT_DB, probabilities, surest
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.intervals import COARSE, coarseness
from attacks.linear.normal_equations import DEFAULT_NOISE, Estimate
from attacks.observation import Observation, Reconstruction
from attacks.tokenizer import Tokenizer

# Rms error, in [0, 1], of a patch at `RIGHT_DB`.
VOUCHED_DEVIATION = 10 ** (-RIGHT_DB / 20)
# Factor on a patch's standard error by the noise of the message, which is then that of a patch at `RIGHT_DB` at most.
# With noise of 1e-5 to 3e-3 of an update's rms entry 4 of 4,347 patches that `patch_embedding` vouches for are below it
# (six photographs each, vit_mini_32 and vit_mini_64, trained, the latter random, too); without it 1 in 100 would be.
NOISE_SLACK = 2**0.5
# Precision of a patch that the prior must not change, in normalised pixels.
FIXED = 1e8


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


def above_noise(deviation: Tensor, std: tuple[float, ...]) -> Tensor:
    """(N,) bool, patches that the noise of the message leaves above `RIGHT_DB`, whatever a prior makes of the rest.

    Args:
        deviation: (N,) standard error of a normalised pixel by that noise.
        std: per-channel normalisation of the inputs.
    """
    return NOISE_SLACK * deviation * (sum(std) / len(std)) < VOUCHED_DEVIATION


def sure_patches(
    observations: Sequence[Observation],
    tokenizer: Tokenizer,
    estimate: Estimate,
    completed: Completed,
    deviation: Tensor,
    *,
    settled: bool,
    noisy: bool | None,
) -> Tensor:
    """(N,) bool, the patches to vouch for of an image that masked updates show.

    None where a message has fewer digits than float32: the probabilities were not calibrated for those. Of the patches
    that they would give, half and more are wrong (shipped vit_mini_64_mjp, ten photographs: float16 at gamma 0.5, int8
    with one scale a tensor; six, four updates without position gradient: float16, bfloat16, int8 with a scale a row).
    Nor where a client has added noise: of those of four updates at gamma 0.5 with noise of 1e-5 and 1e-3 of an update's
    rms entry 13 and 46 % are wrong (six photographs; 5 % without noise), and without position gradient 94 %.

    Args:
        observations: all updates that the equations may be of.
        deviation: (N,), see `above_noise`: where no direction is open nothing else shows a badly conditioned row.
        settled: count only patches that the equations alone settle: others may be missing from them, or the
            probabilities were not calibrated for equations such as these.
        noisy: an update holds more than round-off explains; None where nothing shows whether one does.
    """
    read = tokenizer.positions, tokenizer.weight
    if noisy is not False or any(coarseness(one, read) > COARSE for one in observations):
        return torch.zeros_like(completed.vouched)
    sure = estimate.settled() if settled else completed.vouched
    return sure & above_noise(deviation, observations[-1].std)


def filled(
    prior: VectorialVariation,
    patches: Tensor,
    found: Tensor,
    basis: Tensor,
    tokenizer: Tokenizer,
    std: tuple[float, ...],
) -> Tensor:
    """Patches, those that were not found as the prior completes them between the others.

    Args:
        patches: (N, P) normalised; of one that was not found only what is orthogonal to `basis` is used.
        found: (N,) bool.
        basis: (k, P) orthonormal, the directions in which a patch may differ.
        std: per-channel normalisation of the inputs.
    """
    if found.all():
        return patches
    along = patches @ basis.T
    precision = torch.where(found[:, None], FIXED, 0.0).expand(-1, len(basis))
    estimate = Estimate(patches - along @ basis, basis, along, precision, DEFAULT_NOISE, 0.0)
    return torch.where(found[:, None], patches, prior.settle(estimate, tokenizer, std).patches)


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
