"""An attack in a package of its own: the patches that explain the gradient of the patch projection, by least squares.

With G the position rows of the update (N, D), the gradient of the projection is dL/dE = G^T X, and X are the normalised
patches (N, P). The image is known where the update shows every position once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attacks import Attack, Capability, Observation, Reconstruction, UsageError, find_tokenizer


@dataclass(frozen=True, kw_only=True)
class LeastSquares(Attack):
    """Solve G^T X = dL/dE for X.

    Args:
        cutoff: singular values of G below this share of the largest count as zero.
    """

    cutoff: float = 1e-12

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITION_GRADIENT})

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """See `Attack.reconstruct`."""
        view = observations[-1]
        tokenizer = find_tokenizer(view.model, view.image_shape)
        if tokenizer.positions is None or tokenizer.positions not in view.gradients:
            raise UsageError("the update holds no gradient of a position embedding")
        rows = view.gradients[tokenizer.positions].double().reshape(-1, tokenizer.width)[tokenizer.prefix :]  # (N, D)
        products = view.gradients[tokenizer.weight].double().flatten(1)  # (D, P)
        patches = torch.linalg.pinv(rows.T, rtol=self.cutoff) @ products  # (N, P)
        images = view.to_pixels(tokenizer.unpatchify(patches[None])).float()
        several = view.num_examples > 1 or view.local_steps > 1 or not bool(rows.any(dim=1).all())
        diagnosis = "several images, several steps or hidden positions are mixed in the update" if several else ""
        known = torch.full_like(images[:, :1], not several, dtype=torch.bool)
        batch = (view.num_examples, -1, -1, -1)
        return Reconstruction(images.expand(batch), known.expand(batch), diagnosis=diagnosis)
