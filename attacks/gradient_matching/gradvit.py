"""GradViT (Hatamizadeh et al. 2022): layer-wise distance, a prior on patch borders, priors that join half-way.

Departs from the paper: its image prior, the distance to a pretrained CNN's batch-norm statistics, needs an auxiliary
network that does not come with this package. What takes its place in the second half of the schedule is the total
variation; the first half matches gradients with the patch prior alone. Distances of layers are relative to the whole
gradient's length, so that the priors weigh the same on every model.
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
    """Images of a ViT's batch.

    Args:
        rate: of Adam, in normalised pixels.
        tv, norm, borders: weights of total variation, norm and jumps across patch borders.
    """

    rate: float = 0.3
    tv: float = 0.05
    norm: float = 1e-4
    borders: float = 0.02

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        patch = find_tokenizer(observation.model, observation.image_shape).patch_size
        priors = (PatchBorders(self.borders, patch), TotalVariation(self.tv, begins=HALF), SmallNorm(self.norm))
        return Recipe(LayerwiseL2(1.0, relative=True), Adam(self.rate, CosineDecay(warmup=0.02)), priors)
