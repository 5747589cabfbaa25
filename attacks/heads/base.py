"""What attacks on a dense head have in common: whether the update's head can be read, and what a search costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from attacks.base import Attack
from attacks.linear.dense_head import Rows
from attacks.observation import Observation
from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

# Seconds of one CPU core for a weight of the trunk, a token and an evaluation, and for an evaluation at least.
SECONDS_A_PRODUCT, SECONDS_AN_EVALUATION = 2e-10, 5e-3


@dataclass(frozen=True, kw_only=True)
class HeadAttack(Attack):
    """Reads a head with known rows, then searches the images whose tokens it has.

    Args:
        steps: evaluations of the search, at most (those of line searches not counted).
    """

    steps: int = 200

    rows: ClassVar[Rows]
    seconds_of_reading: ClassVar[float] = 0.0

    def obstacle(self, observations: Sequence[Observation]) -> str:
        """See `Attack.obstacle`: why the head cannot be read."""
        try:
            target = observations[-1]
            self.rows.find(target, find_tokenizer(target.model, target.image_shape))
        except UsageError as error:
            return str(error)
        return ""

    def estimated_seconds(self, observations: Sequence[Observation]) -> float:
        """See `Attack.estimated_seconds`: reading, and forward and backward passes of every image."""
        target = observations[-1]
        tokenizer = find_tokenizer(target.model, target.image_shape)
        products = target.num_examples * tokenizer.num_patches * sum(p.numel() for p in target.model.parameters())
        return self.seconds_of_reading + self.steps * (SECONDS_AN_EVALUATION + SECONDS_A_PRODUCT * products)
