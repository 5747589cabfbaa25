"""Inverting Gradients (Geiping, Bauermeister, Dröge and Moeller 2020): cosine distance, signed Adam, total variation.

The authors run 4,800 to 24,000 steps. The default here is a budget for a CPU, and the rate's schedule scales with the
number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import Cosine
from attacks.gradient_matching.optimisers import Adam, StepDecay
from attacks.gradient_matching.priors import TotalVariation
from attacks.observation import Observation


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(GradientMatching):
    """Matches the direction of the gradient.

    Args:
        rate: learning rate of signed Adam, in normalised pixels.
        tv: weight of the total variation.
    """

    rate: float = 0.1
    tv: float = 0.2

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        return Recipe(Cosine(), Adam(self.rate, StepDecay(), signed=True), (TotalVariation(self.tv),))
