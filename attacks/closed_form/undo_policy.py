"""Knows ATS: inverts the update, then undoes the policy by which the client transformed its image.

`patch_embedding` gives the image that was fed to its last digit. The server that orders a policy knows it, but not
which of several it was nor the random signs. So every choice is undone (`attacks.inverse_transformations`) and tested
by applying the policy again; among nearly equally consistent ones the brightness and contrast of photographs decide,
and if those differ nothing is vouched for. What a shift moved out of the frame is in no single update. Other rounds
shift the same image the other way: with several updates those that agree on what they share are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from attacks.base import Attack
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.inverse_transformations import LUMA, Undone, fill, undo_policies
from attacks.linear.position_rows import read_position_rows
from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.policies import PUBLISHED, read_policies
from attacks.registry import UsageError

# Residual above which the policy does not explain the image: photographs that no policy has changed have 0.05 and more
# under the published pair, policies that were undone 0.02 and less (eight photographs at 64 pixels).
EXPLAINED = 0.03
# Residuals in [0, 1] below which a guess may be right beside the best, and their deviation by rounding to 8 bits.
NEAR, ROUNDING = 4 / 255, 0.001
# Mean and deviation of a photograph's mean luma, and of the logarithm of its luma's deviation: 800 ImageNet photographs
# at 64 pixels.
MEAN, LOG_DEVIATION = (0.467, 0.127), (np.log(0.199), 0.30)
# Rms difference in [0, 1] up to which two views show the same image where both are exact, and least share of pixels.
AGREEING, LEAST_SHARED = 0.05, 0.05


@dataclass(frozen=True, kw_only=True)
class UndoPolicy(Attack):
    """Undoes a transformation policy.

    Args:
        policy: the clients' (`--ats-policy`): numbers joined by "-", several policies joined by "+".
        joins: put several updates together that show the same image.
        solver: gives the image that was fed.
    """

    policy: str = PUBLISHED
    joins: bool = False
    solver: PatchEmbedding = field(default_factory=PatchEmbedding)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    def granted(self, threat_model: ThreatModel) -> Self:
        """See `Attack.granted`: with several rounds, updates are joined."""
        return replace(self, joins=self.joins or Capability.SEVERAL_ROUNDS in threat_model.grants)

    def used(self) -> frozenset[Capability]:
        """See `Attack.used`."""
        return self.needs | ({Capability.SEVERAL_ROUNDS} if self.joins else frozenset())

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: whether the image that the update shows is one that the policy makes."""
        try:
            self._before(observations[-1])
        except UsageError as error:
            return str(error)
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` holds the policy's residual, the share of known pixels, and the updates.

        Unknown pixels are at the mean of the known ones.
        """
        found, guesses = self._before(observations[-1])
        best = min(guesses, key=_implausibility)
        whole, joined = best, 1
        for earlier in reversed(observations[:-1] if self.joins else []):
            try:
                other = min(self._before(earlier)[1], key=lambda guess: _difference(guess, whole))
            except UsageError:  # that update shows no image, or one that the policy does not make
                continue
            if _difference(other, whole) < AGREEING:
                whole, joined = _together(whole, other), joined + 1
        sure = all(_difference(best, other) < AGREEING for other in guesses)
        missing = 1 - float(whole.seen.mean())
        reasons = [found.diagnosis] if found.diagnosis else []
        if not sure:
            reasons.append("several choices of policy and signs make the image that the update shows")
        if missing:
            reasons.append(f"the policy moved {missing:.0%} of the pixels out of the frame of all updates of the image")
        image = torch.from_numpy(whole.pixels / 255).permute(2, 0, 1)[None]
        known = torch.from_numpy(whole.exact)[None, None] & sure & bool(found.known.all())
        return Reconstruction(
            images=image.to(found.images),
            known=known.to(found.images.device),
            diagnosis="; ".join(reasons),
            flags=found.flags,
            details={**found.details, "policy_residual": best.residual, "seen": 1 - missing, "joined": joined},
        )

    def _before(self, observation: Observation) -> tuple[Reconstruction, list[Undone]]:
        """What the solver finds, and the guesses that explain it.

        Raises:
            UsageError: there is no image, not of three channels, or one that the policy does not make; or positions
                are masked, so that patches of the image that is found are in other places.
        """
        update = read_position_rows(observation)
        if update.masked.any():
            raise UsageError(f"{update.mask_in_words()}: mjp_subspace and mjp_rounds are for masked positions")
        found = self.solver.reconstruct([observation])
        if found.images is None:
            raise UsageError(found.diagnosis)
        if found.images.shape[1] != 3:
            raise UsageError(f"policies transform three channels, and the model takes {found.images.shape[1]}")
        guesses = undo_policies(_bytes(found.images[0]), read_policies(self.policy))
        least = guesses[0].residual
        if least > EXPLAINED:
            unlike = (
                f"the image that the update shows is not one that policy {self.policy} makes: undone and applied again "
                f"it differs by {least:.0%}"
            )
            raise UsageError("; ".join(filter(None, (found.diagnosis, unlike))))
        return found, [one for one in guesses if one.residual <= max(2 * least, NEAR)]


def _difference(one: Undone, other: Undone) -> float:
    """Rms difference in [0, 1] of two images where both are exact; infinite where they share too little."""
    both = one.exact & other.exact
    if both.mean() < LEAST_SHARED:
        return float("inf")
    return float(np.sqrt((((one.pixels - other.pixels)[both] / 255) ** 2).mean()))


def _together(one: Undone, other: Undone) -> Undone:
    """Two views of one image: exact pixels of the first, then of the second, then those that are seen at all."""
    pixels = one.pixels.copy()
    for take in (other.seen & ~one.seen, other.exact & ~one.exact):
        pixels[take] = other.pixels[take]
    seen = one.seen | other.seen
    return Undone(fill(pixels, seen), seen, one.exact | other.exact, one.residual)


def _bytes(image: Tensor) -> np.ndarray:
    """(C, H, W) in [0, 1] as (H, W, C) uint8."""
    return image.mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()


def _implausibility(guess: Undone) -> float:
    """Minus twice the logarithm of a guess' probability, up to a constant: residual, and luma as photographs have."""
    luma = (guess.pixels[guess.seen] @ LUMA) / 255
    statistics = ((luma.mean(), MEAN), (np.log(luma.std() + 1e-9), LOG_DEVIATION))
    return (guess.residual / ROUNDING) ** 2 / 2 + sum(((x - mean) / width) ** 2 for x, (mean, width) in statistics)
