"""Frozen position embedding: the client neither trains nor sends it.

It withholds what most closed forms solve with, and hides nothing: the server knows the position embedding that it sent,
and the gradients of the first block still span the tokens, from which `token_span` computes the image. Any other
parameters: `fedmjp.defenses.withheld`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedmjp.defenses.base import Defense
from fedmjp.defenses.parameter_groups import belongs


@dataclass(frozen=True)
class FrozenPositions(Defense):
    """Train no table that is added to tokens (MJP's unknown embedding and IDX's too): the server sees none of them."""

    hides_positions: ClassVar[bool] = True
    # batch_rounds and mjp_rounds solve with the first attention where the position rows are not sent.
    known_by: ClassVar[tuple[str, ...]] = ("token_span", "unmix", "batch_rounds", "mjp_rounds")

    def freezes(self, name: str) -> bool:
        """Whether the parameter is such a table."""
        return belongs(name, ("positions",))
