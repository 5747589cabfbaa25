"""Frozen position embedding: the client neither trains nor sends it.

The closed forms live on the gradient of the position embedding; this defence withholds just that, at no cost in
computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.defenses.base import DEFENSES, Defense


@DEFENSES.register("frozen_positions")
@dataclass(frozen=True)
class FrozenPositions(Defense):
    """Drop the position embedding (and MJP's unknown one) from the update: the server sees zeros and keeps its own."""

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Zero the entries of `pos_embed` and `unk_embed`."""
        return {n: torch.zeros_like(t) if n in ("pos_embed", "unk_embed") else t for n, t in update.items()}
