"""Inversion of several updates of a client that hides positions anew each time (Masked Jigsaw Puzzle).

Each update that shows the target's image adds its equations (`attacks.linear.normal_equations`): what one mask hides
another shows. The network's weights may change in between, masked, unmasked and unjigsawed steps mix freely, and
nothing but sums is kept. Open directions that every update hides are left to the image prior.

What it cannot do is see a patch that every mask hides, and block-wise masks hide the middle most: at gamma 0.9 each of
80 rounds hides the same 41 to 62 of 196 patches (ten seeds), 2 to 10 of them still after 400. `never_seen` counts them.

Which updates show the target's image is read off their row spaces. dL/dE = G^T X has the image's patches for a row
space, whatever the weights, and jigsawing only reorders them: an update of the same image leaves nothing but noise
outside the target's row space, an update of another image leaves a part of that image there. Where patches have no more
values than there are patches, the row space is everything and cannot tell; the attack then says so and uses the last
update alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.linear.image_prior import VectorialVariation
from attacks.linear.masked_update import HiddenUpdate, products, read_update, tokenizer_and_rows, why_not
from attacks.linear.normal_equations import Equations
from attacks.mjp.subspace import details_of, reconstruction, settle
from attacks.observation import Capability, Observation, Reconstruction
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer

# An update shows the target's image where the share of it outside the target's row space is below this geometric way
# from the noise (0) to what another photograph leaves there (1).
SAME = 0.5
OTHER_SHARE = 3e-3


@dataclass(frozen=True, kw_only=True)
class MJPRounds(Attack):
    """Whole image of the last update, from all updates that show it.

    Args:
        prior: what settles the directions that every update hides.
    """

    prior: VectorialVariation = field(default_factory=VectorialVariation)

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT, Capability.SEVERAL_ROUNDS})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`; `details` adds updates used, patches never seen, open directions and misfit."""
        target = observations[-1]
        tokenizer, rows = tokenizer_and_rows(target)
        known = gather(observations, tokenizer, rows)
        estimate = known.last.estimate() if known.equations.updates == 1 else known.equations.solve()
        settled = settle(self.prior, estimate, tokenizer, target, known.seen)
        details = details_of(known.last, settled) | {
            "updates": known.equations.updates,
            "never_seen": int((~known.seen).sum()),
            "open": len(estimate.open),
            "residual": estimate.residual,
        }
        return reconstruction(target, tokenizer, settled, known.reasons, details)


@dataclass(frozen=True)
class Known:
    """What a client's updates say of the last one's image.

    Attributes:
        last: the last update, read.
        equations: of all updates that show its image.
        seen: (N,) bool, patches that at least one of them shows.
        reasons: why not to trust it, in words.
    """

    last: HiddenUpdate
    equations: Equations
    seen: Tensor
    reasons: list[str]


def gather(observations: Sequence[Observation], tokenizer: Tokenizer, rows: Tensor) -> Known:
    """Add up the updates that show the last one's image.

    Args:
        rows: (N, D), the patches' rows of the last update's position gradient.
    """
    target = observations[-1]
    last = read_update(target, tokenizer, rows)
    reasons = why_not(target, last, tokenizer)
    equations = Equations(tokenizer.num_patches, tokenizer.patch_dim, rows.device)
    last.add_to(equations)
    seen = ~last.clean.masked  # (N,)
    signature = Signature.of(target, tokenizer)
    if signature is not None and not reasons:
        for earlier in observations[:-1]:
            update = _usable(earlier, tokenizer)
            if update is not None and signature.matches(earlier, tokenizer):
                update.add_to(equations)
                seen = seen | ~update.clean.masked
    elif signature is None and len(observations) > 1:
        reasons.append(
            f"patches have {tokenizer.patch_dim} values and there are {tokenizer.num_patches} of them: the updates "
            "do not tell which of them show the same image (needs values > patches); the last one was used alone"
        )
    return Known(last, equations, seen, reasons)


@dataclass(frozen=True)
class Signature:
    """The row space of an image's patches.

    Attributes:
        space: (r, P + 1) orthonormal.
        noise: share of the target's own products outside of it.
    """

    space: Tensor
    noise: float

    @classmethod
    def of(cls, observation: Observation, tokenizer: Tokenizer) -> Signature | None:
        """Of one update; None where its row space could be everything."""
        s = products(observation, tokenizer)  # (D, P + 1)
        n = tokenizer.num_patches
        if tokenizer.patch_dim <= n:
            return None
        values, vectors = torch.linalg.eigh(s.T @ s)  # ascending
        outside = values[:-n].clamp(min=0).sum() / values.sum()
        return cls(vectors[:, -n:].T, float(outside.sqrt()))

    def share_outside(self, observation: Observation, tokenizer: Tokenizer) -> float:
        """Share of an update's products (by norm) that this row space does not hold."""
        s = products(observation, tokenizer)
        return float((s - (s @ self.space.T) @ self.space).norm() / s.norm())

    def matches(self, observation: Observation, tokenizer: Tokenizer) -> bool:
        """Whether an update shows the same image."""
        own = max(self.noise, 1e-7)
        return self.share_outside(observation, tokenizer) < own ** (1 - SAME) * OTHER_SHARE**SAME


def _usable(observation: Observation, tokenizer: Tokenizer) -> HiddenUpdate | None:
    """An earlier update, read; None where it does not carry equations of a single image."""
    try:
        found, rows = tokenizer_and_rows(observation)
    except UsageError:
        return None
    if found != tokenizer or not rows.isfinite().all():
        return None
    update = read_update(observation, tokenizer, rows)
    return None if why_not(observation, update, tokenizer) else update
