"""Clipping and Gaussian noise on the whole update, the mechanism of differentially private SGD (Abadi et al. 2016).

Departs from DP-SGD: the clip is on the client's mean gradient, not on each example's, so no epsilon is claimed.
Flower's own clipping and noise mods assume that a client returns parameters; on gradients they are silently wrong,
hence this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class ClippedNoise(Defense):
    """Options of --defense noise."""

    random: ClassVar[bool] = True
    # It weighs every equation by the noise that the update itself shows.
    known_by: ClassVar[tuple[str, ...]] = ("patch_embedding",)

    clip_norm: float = 1.0
    """Largest Euclidean norm of an update."""
    noise_multiplier: float = 1e-3
    """Standard deviation of the noise on each entry, in units of --clip-norm."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if self.clip_norm <= 0 or self.noise_multiplier < 0:
            raise UsageError("--clip-norm must be positive and --noise-multiplier not negative")

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Scale to norm <= clip_norm, then add noise."""
        import torch

        norm = torch.stack([t.double().square().sum() for t in update.values()]).sum().sqrt()
        scale = float((self.clip_norm / norm.clamp(min=1e-30)).clamp(max=1))
        sigma = self.noise_multiplier * self.clip_norm
        noise = {n: torch.randn(t.shape, generator=generator, device=generator.device) for n, t in update.items()}
        return {n: t * scale + sigma * noise[n].to(t.device) for n, t in update.items()}
