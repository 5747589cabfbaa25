"""See through Gradients (GradInversion; Yin et al. 2021): squared distance, noisy Adam, starts that have to agree.

Departs from the paper: no batch-norm prior, which needs a CNN's statistics and so an auxiliary network on a ViT; the
group's mean is taken without registration; the distance is squared, as in the `breaching` package, but relative to the
gradient's own size, so that the priors weigh the same on every model.
"""

from __future__ import annotations

from dataclasses import dataclass

from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import SquaredL2
from attacks.gradient_matching.optimisers import Adam, CosineDecay
from attacks.gradient_matching.priors import GroupConsistency, SmallNorm, TotalVariation
from attacks.observation import Observation


@dataclass(frozen=True, kw_only=True)
class SeeThroughGradients(GradientMatching):
    """Images by several starts that agree.

    Args:
        rate: of Adam, in normalised pixels.
        tv, norm, group: weights of total variation, norm, and agreement between restarts.
        langevin: noise on the gradient, in units of the rate.
    """

    rate: float = 0.3
    tv: float = 0.1
    norm: float = 1e-3
    group: float = 0.01
    langevin: float = 0.01

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        priors = (TotalVariation(self.tv), SmallNorm(self.norm), GroupConsistency(self.group))
        adam = Adam(self.rate, CosineDecay(warmup=0.02), langevin=self.langevin)
        return Recipe(SquaredL2(relative=True), adam, priors if self.restarts > 1 else priors[:2])
