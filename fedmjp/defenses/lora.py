"""LoRA: clients train low-rank terms beside some layers' weights, and the head (Hu et al. 2022, arXiv:2106.09685).

It is a way to train with few numbers, and no defence by design; what it withholds is all but the factors' gradients.
`attacks.closed_form.lora_span` derives what these hold: of the first attention the r rows of dL/dA lie in the span of
its inputs, and rounds of the same image add up to the whole span.

Departs from the paper: query, key and value of timm's fused layer share one term (theirs adapts query and value), and
the classifier is trained beside it, as the package `peft` does for new classes (`modules_to_save`).
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
class LowRankAdaptation(Defense):
    """Options of --defense lora."""

    hides_positions: ClassVar[bool] = True
    # lora_span collects the factors' gradients over rounds; a search matches what is sent; lora_trap sets what is sent
    # so that the factors read patches.
    known_by: ClassVar[tuple[str, ...]] = ("lora_span", "inverting_gradients", "lora_trap")

    lora_rank: int = 8
    """Rank r of the terms (the paper: 1 to 64, mostly 4 or 8)."""
    lora_alpha: float = 16.0
    """The terms are scaled by alpha / r (the paper sets alpha to the first r that is tried)."""
    lora_targets: tuple[str, ...] = ("*attn.qkv",)
    """Linear layers that get a term, as patterns of their names."""

    def validate(self) -> None:
        """Raise `UsageError` for options out of range."""
        if self.lora_rank < 1:
            raise UsageError(f"--lora-rank must be at least 1, not {self.lora_rank}")
        if not self.lora_alpha > 0:
            raise UsageError(f"--lora-alpha must be positive, not {self.lora_alpha}")
        if not self.lora_targets:
            raise UsageError("--lora-targets takes at least one pattern of layers' names, such as '*attn.qkv'")

    def adapt(self, module: nn.Module) -> None:
        """Add the terms, A drawn at random and B zero; the model computes what it did before.

        Raises:
            UsageError: see `add_low_rank`.
        """
        from fedmjp.models.low_rank import add_low_rank

        add_low_rank(module, self.lora_targets, self.lora_rank, self.lora_alpha)

    def freezes(self, name: str) -> bool:
        """Whether the parameter is neither a factor nor the classifier's."""
        return not belongs(name, ("*.lora_A", "*.lora_B", "head"))
