"""Clipping and Gaussian noise on the whole update, the mechanism of differentially private SGD (Abadi et al. 2016).

Departs from DP-SGD: the clip is on the client's mean gradient, not on each example's, so no epsilon is claimed.
Flower's own clipping and noise mods assume that a client returns parameters; on gradients they are silently wrong,
hence this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense, refuse_batch_norms

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


# They measure the noise in the message and weigh its equations by it; `noisy_rounds` does so over rounds, masked or
# not, `mjp_rounds` where masked rows show the noise (up to 5 % of dL/db). `batch_rounds` joins no updates with noise
# (1e-4, measured).
KNOWING_NOISE = ("noisy_rounds", "patch_embedding", "token_span", "mjp_subspace", "mjp_rounds")


@dataclass(frozen=True)
class ClippedNoise(Defense):
    """Options of --defense noise."""

    random: ClassVar[bool] = True
    added: ClassVar[tuple[str, ...]] = ("noise_unit",)
    known_by: ClassVar[tuple[str, ...]] = (*KNOWING_NOISE, "known_draws")

    clip_norm: float = 1.0
    """Largest Euclidean norm of an update."""
    noise_multiplier: float = 1e-3
    """Standard deviation of the noise on each entry, in units of --noise-unit; 1e-4 to 1e-1 of the update's own entries
    is the range in common use."""
    noise_unit: Literal["clip", "entry"] = "clip"
    """What the noise is measured in: --clip-norm, or the root mean square of the entries of the clipped update, so that
    the same share of every update is noise, whatever its norm."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 < self.clip_norm < math.inf:
            raise UsageError(f"--clip-norm must be positive and finite, not {self.clip_norm}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise UsageError(f"--noise-multiplier must be finite and not negative, not {self.noise_multiplier}")

    def adapt(self, module: nn.Module) -> None:
        """Refuse a model with batch norms, whose running statistics are sent beside the update, without noise."""
        refuse_batch_norms(
            module,
            "--defense noise: the batch norms of this --model send the statistics of the client's batch without noise; "
            "name a model without them",
        )

    @property
    def adapts(self) -> bool:
        """No layer is changed."""
        return False

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Scale to norm <= clip_norm, then add noise."""
        import torch

        norm = torch.stack([t.double().square().sum() for t in update.values()]).sum().sqrt()
        scale = float((self.clip_norm / norm.clamp(min=1e-30)).clamp(max=1))
        entries = sum(t.numel() for t in update.values())
        unit = self.clip_norm if self.noise_unit == "clip" else scale * float(norm) / max(entries, 1) ** 0.5
        sigma = self.noise_multiplier * unit
        noise = _standard_normal(update, generator)
        return {n: t * scale + sigma * noise[n].to(t.device) for n, t in update.items()}

    def known_noise(self, sent: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """The same noise; of --noise-unit entry with the deviation that makes the rest of the message as it says."""
        noise = {n: z.to(sent[n].device) for n, z in _standard_normal(sent, generator).items()}
        sigma = self.noise_multiplier * self.clip_norm
        if self.noise_unit == "entry":
            sigma = self._deviation(sent, noise)
        return {n: sigma * z for n, z in noise.items()}

    def _deviation(self, sent: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> float:
        """sigma of --noise-unit entry: m |sent - sigma z| / n^1/2 = sigma for n entries, a quadratic equation."""
        if not self.noise_multiplier:
            return 0.0
        pairs = [(z.double(), sent[name].double()) for name, z in noise.items()]
        own, shared, whole = (
            sum(float(part) for part in parts)
            for parts in zip(*((z.square().sum(), (z * s).sum(), s.square().sum()) for z, s in pairs), strict=True)
        )
        entries = sum(z.numel() for z, _ in pairs)
        excess = entries / self.noise_multiplier**2 - own
        root = max(shared**2 + excess * whole, 0.0) ** 0.5
        return whole / max(shared + root, 1e-30)


def _standard_normal(like: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Standard normal numbers of the same shapes, on the generator's device."""
    import torch

    return {n: torch.randn(t.shape, generator=generator, device=generator.device) for n, t in like.items()}
