"""Frozen position embedding: the client neither trains nor sends it.

It withholds what most closed forms solve with, and hides nothing: the server knows the position embedding that it sent,
and the gradients of the first block still span the tokens, from which `token_span` computes the image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedmjp.defenses.base import Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class FrozenPositions(Defense):
    """Drop the position embedding (MJP's unknown one and IDX's too) from the update: the server sees zeros."""

    hides_positions: ClassVar[bool] = True
    known_by: ClassVar[tuple[str, ...]] = ("token_span",)

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Zero the entries of every table that is added to tokens."""
        import torch

        from fedmjp.models import POSITION_TABLES

        return {n: torch.zeros_like(t) if n in POSITION_TABLES else t for n, t in update.items()}
