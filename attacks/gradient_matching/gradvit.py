"""GradViT (Hatamizadeh et al. 2022): layer-wise distance, a prior on patch borders, an image prior in the second half.

Departs from the paper: its image prior, the distance to a pretrained CNN's batch-norm statistics, needs an auxiliary
network that this package does not include. The total variation replaces it in the second half of the schedule; the
first half matches gradients with the patch prior alone. The layers' distances are relative to the norm of the whole
gradient, so that the priors' weights have the same effect on every model.
"""

from __future__ import annotations

from dataclasses import dataclass

from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import LayerwiseL2
from attacks.gradient_matching.optimisers import Adam, CosineDecay
from attacks.gradient_matching.priors import PatchBorders, SmallNorm, TotalVariation
from attacks.observation import Observation
from attacks.tokenizer import find_tokenizer

HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class GradViT(GradientMatching):
    """Recovers a batch from a ViT's gradient.

    Args:
        rate: learning rate of Adam, in normalised pixels.
        tv, norm, borders: weights of the total variation, the norm and the jumps across patch borders.
    """

    rate: float = 0.3
    tv: float = 0.05
    norm: float = 1e-4
    borders: float = 0.02

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        patch = find_tokenizer(observation.model, observation.image_shape).patch_size
        priors = (PatchBorders(self.borders, patch), TotalVariation(self.tv, active_from=HALF), SmallNorm(self.norm))
        return Recipe(LayerwiseL2(1.0, relative=True), Adam(self.rate, CosineDecay(warmup=0.02)), priors)
