"""Adapters: clients train small bottleneck layers behind each MLP, and the head (`fedmjp.models.adapters`).

A way to train with few numbers, and no defence by design. An adapter's gradients are sums over its inputs h_t,
outputs of an MLP: dL/dV = sum_t d_t h_t^T lies in their span. Those of the first block are a function of all
patches together, not of one, so that no closed form here reads an image from them; searches match what is sent. A
server that sets the backbone reads a patch in every hidden unit (`attacks.active.adapter_trap`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense
from fedmjp.defenses.parameter_groups import belongs

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Adapters(Defense):
    """Options of --defense adapters."""

    hides_positions: ClassVar[bool] = True
    known_by: ClassVar[tuple[str, ...]] = ("inverting_gradients", "dlg", "adapter_trap")

    adapter_size: int = 16
    """Hidden units r of an adapter (Houlsby et al.: 8 to 256)."""

    def validate(self) -> None:
        """Raise `UsageError` for an adapter without hidden units."""
        if self.adapter_size < 1:
            raise UsageError(f"--adapter-size must be at least 1, not {self.adapter_size}")

    def adapt(self, module: nn.Module) -> None:
        """Add the adapters; the model computes what it did before.

        Raises:
            UsageError: see `add_adapters`.
        """
        from fedmjp.models.adapters import add_adapters

        add_adapters(module, self.adapter_size)

    def freezes(self, name: str) -> bool:
        """Whether the parameter is neither an adapter's nor the classifier's."""
        return not belongs(name, ("*.adapter.*", "head"))
