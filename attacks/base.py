"""The attack interface and its registry.

A new attack is one file: a class with a keyword-only frozen configuration, `needs` (the capabilities it uses), and
`reconstruct(observations)`; the decorator `@ATTACKS.register("name")` puts it into every table.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from attacks.observation import Capability, Observation, Reconstruction, ThreatModel
from attacks.registry import Registry, UsageError

# A gradient below this norm holds nothing but round-off of a float32 loss.
NEGLIGIBLE_NORM = 1e-10


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Base class: configuration in the dataclass fields, data in the call, the same checks before every attack."""

    needs: ClassVar[frozenset[Capability]] = frozenset()

    def __call__(self, observations: Sequence[Observation]) -> Reconstruction:
        """Attack a sequence of updates, oldest first.

        Returns:
            A `Reconstruction` of the last update's batch. An attack that cannot work answers with a diagnosis.

        Raises:
            ValueError: the sequence is empty, or a gradient holds NaN or infinity.
        """
        if not observations:
            raise ValueError("an attack needs at least one observation")
        started = time.perf_counter()
        target = observations[-1]
        for name, gradient in target.gradients.items():
            if not torch.isfinite(gradient).all():
                raise ValueError(f"the gradient of {name} (client {target.client}, round {target.round}) is not finite")
        norm = target.gradient_norm()
        if norm < NEGLIGIBLE_NORM:
            reason = f"the gradient norm is {norm:.1e}: the update says nothing about the batch (a saturated model)"
            result = Reconstruction(images=None, diagnosis=reason)
        else:
            with torch.no_grad():
                result = self.reconstruct(observations)
        return replace(result, seconds=time.perf_counter() - started)

    @abstractmethod
    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        """The attack itself, called under `torch.no_grad` with finite, non-negligible gradients."""

    def parameters(self) -> dict[str, Any]:
        """The configuration as plain values, for the results row."""
        return asdict(self)

    def require(self, threat_model: ThreatModel, name: str) -> None:
        """Refuse to run under a threat model that grants less than the attack needs.

        Raises:
            UsageError: naming what is lacking.
        """
        lacking = threat_model.lacks(self.needs)
        if lacking:
            raise UsageError(
                f"attack {name!r} needs {', '.join(lacking)}, which the threat model does not grant (--grants)"
            )


ATTACKS: Registry[type[Attack]] = Registry("attack")
