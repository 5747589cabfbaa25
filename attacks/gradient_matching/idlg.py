"""Improved Deep Leakage from Gradients (Zhao, Mopuri and Bilen 2020): DLG with the label inferred from the last layer.

Departs from the paper: it accepts batches too, with labels inferred by counts (`attacks.gradient_matching.labels`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attacks.gradient_matching.attack import Recipe
from attacks.gradient_matching.dlg import DeepLeakage
from attacks.observation import Observation


@dataclass(frozen=True, kw_only=True)
class ImprovedDeepLeakage(DeepLeakage):
    """Infers the labels, then optimises the images by L-BFGS."""

    def recipe(self, observation: Observation) -> Recipe:
        """See `GradientMatching.recipe`."""
        return replace(super().recipe(observation), optimises_labels=False)
