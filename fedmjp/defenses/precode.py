"""PRECODE: a variational bottleneck in front of the classifier (Scheliga, Mäder and Seeland 2022, WACV).

The loss gains weight * KL(N(mu, sigma^2) || N(0, 1)), and the gradients of the bottleneck and of what follows it depend
on the client's random numbers, so that an attack that matches them does not converge. Everything before the bottleneck
receives the gradient of the representation: another vector than without it, and no other equations. Closed forms at the
patch projection read neither bottleneck nor classifier and are exact as before (Scheliga et al. 2022, arXiv:2208.04767,
and Balunovic et al. 2022, arXiv:2111.04706, leave these layers out of gradient matching: `leave_out`).

Departs from the published code in evaluating the mean instead of a sample (`fedmjp.models.bottleneck`). The bottleneck
is new where weights of a plain model are loaded, and loaded from weights that were trained under PRECODE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.defenses.base import FIRST_LAYERS, Defense

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Precode(Defense):
    """Options of --defense precode."""

    random: ClassVar[bool] = True
    known_by: ClassVar[tuple[str, ...]] = FIRST_LAYERS

    bottleneck_size: int = 256
    """Channels of the sample (published code: 256)."""
    divergence_weight: float = 1e-3
    """Weight of the divergence from the unit Gaussian, in bits (published code: 0.001)."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if self.bottleneck_size < 1:
            raise UsageError(f"--bottleneck-size must be at least 1, not {self.bottleneck_size}")
        if not 0 <= self.divergence_weight < float("inf"):
            raise UsageError(f"--divergence-weight must not be negative, but is {self.divergence_weight}")

    def adapt(self, module: nn.Module) -> None:
        """Insert the bottleneck.

        Raises:
            UsageError: the model has no linear classifier.
        """
        from fedmjp.models.bottleneck import insert_bottleneck
        from fedmjp.models.classifier import classifier_name

        insert_bottleneck(module, classifier_name(module, "precode"), self.bottleneck_size)

    def loss_weights(self) -> Mapping[str, float]:
        """The divergence, which is taken from the bottleneck at each step even if it counts for nothing."""
        return {"bottleneck_divergence": self.divergence_weight}
