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
    rescale: bool = False
    """Divide the entries that are sent by the share of them."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if not 0 <= self.gamma < 1:
            raise UsageError(f"--toy.gamma must lie in [0, 1), not {self.gamma}")

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Zero the smallest entries."""
        import torch

        factor = 1 / (1 - self.gamma) if self.rescale else 1.0
        sent = {}
        for name, tensor in update.items():
            least = tensor.abs().flatten().kthvalue(1 + int(self.gamma * (tensor.numel() - 1))).values
            sent[name] = torch.where(tensor.abs() >= least, factor * tensor, torch.zeros_like(tensor))
        return sent
