"""See through Gradients (GradInversion; Yin et al. 2021): squared distance, noisy Adam, group consistency of restarts.

Departs from the paper: there is no batch-norm prior, which needs a CNN's statistics and thus an auxiliary network for a
ViT; the group's mean is taken without registration; the distance is squared, as in the `breaching` package, but
relative to the squared norm of the gradient, so that the priors' weights have the same effect on every model.
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
    """Matches gradients from several restarts that are pulled towards their mean.

    Args:
        rate: learning rate of Adam, in normalised pixels.
        tv, norm, group: weights of the total variation, the norm, and the consistency between restarts.
        langevin: standard deviation of the noise on the gradient, in units of the rate.
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
