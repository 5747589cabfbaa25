"""What a server holds between two rounds, and what a run is resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ServerState:
    """Tensors by name, in three parts.

    Attributes:
        weights: the global model's parameters and float buffers.
        kept: what the server keeps for all clients (`Objective.kept_by`); empty if it keeps nothing.
        optimizer: moments of the server's optimiser (`ServerOptimizer.state`); empty if it has none.
    """

    weights: Mapping[str, Tensor]
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
