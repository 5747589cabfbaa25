"""APRIL's optimisation attack (Lu et al. 2021): gradient matching plus the cosine of the position gradients.

The paper does not give the optimiser's settings; this implementation uses Adam with a step-wise decaying rate. The
squared distance is relative to the squared norm of the gradient, so that the cosine's weight has the same effect on
every model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attacks.gradient_matching.attack import GradientMatching, Recipe
from attacks.gradient_matching.distances import PositionCosine, SquaredL2, Sum
from attacks.gradient_matching.optimisers import Adam, StepDecay
from attacks.linear.position_rows import missing_positions, position_gradient
from attacks.observation import Capability, Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer


@dataclass(frozen=True, kw_only=True)
class AprilOptimisation(GradientMatching):
    """Matches the whole gradient, and the direction of the position embedding's gradient.

    Args:
        rate: learning rate of Adam, in normalised pixels.
        alpha: weight of the cosine term.
    """

    rate: float = 0.3
    alpha: float = 1.0

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.MODEL_WEIGHTS, Capability.POSITION_GRADIENT})

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        tokenizer = find_tokenizer(observation.model, observation.image_shape)
        if position_gradient(observation, tokenizer) is None:
            raise UsageError(missing_positions(observation, tokenizer))
        distance = Sum((SquaredL2(relative=True), PositionCosine(tokenizer.positions, self.alpha)))
        return Recipe(distance, Adam(self.rate, StepDecay()))
