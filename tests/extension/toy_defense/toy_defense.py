"""A defence in a package of its own: the client sends only the largest entries of each tensor of its update.

It imports torch inside the hook, so that `--help` stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attacks import UsageError
from fedmjp.defenses import Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Sparse(Defense):
    """Options of --defense toy."""

    gamma: float = 0.9
    """Share of the entries of each tensor that are not sent, in [0, 1)."""
    per_tensor: bool = True
    """Choose the largest entries of each tensor, or of the whole update."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.gamma < 1:
            raise UsageError(f"--toy.gamma must lie in [0, 1), not {self.gamma}")

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Zero the smallest entries."""
        import torch

        def limit(values: Tensor) -> Tensor:
            return values.sort().values[int(self.gamma * (len(values) - 1))]

        sizes = {n: t.abs().flatten() for n, t in update.items()}
        limits = {n: limit(sizes[n] if self.per_tensor else torch.cat(list(sizes.values()))) for n in sizes}
        return {n: torch.where(t.abs() >= limits[n], t, torch.zeros_like(t)) for n, t in update.items()}
