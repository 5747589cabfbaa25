"""Deep Leakage from Gradients (Zhu, Liu and Han 2019): images and labels optimised together, squared distance, L-BFGS.

Departs from the authors' code: one evaluation counts as one step (an iteration of theirs makes up to 20 evaluations, on
the same path), and the distance is relative to the squared norm of the gradient, because torch's L-BFGS ignores
curvature below 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass

from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import SquaredL2
from attacks.gradient_matching.optimisers import LBFGS
from attacks.observation import Observation


@dataclass(frozen=True, kw_only=True)
class DeepLeakage(GradientMatching):
    """Optimises images and labels by L-BFGS.

    Args:
        rate: length of a quasi-Newton step.
    """

    rate: float = 1.0

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        return Recipe(SquaredL2(relative=True), LBFGS(self.rate), clamps_pixels=False, optimises_labels=True)
