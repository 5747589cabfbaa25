"""Fewer bits an entry: signs, grids of 15 or 255 values, half precision.

*sign* sends one bit an entry (signSGD, Bernstein et al. 2018) and the mean magnitude, the scale of Karimireddy et al.
2019; zeros are sent as +. *int4* and *int8* are symmetric grids
whose last value is the largest magnitude, with entries rounded to the nearest one or at random so that the expectation
is right (QSGD, Alistarh et al. 2017, with the largest magnitude for their 2-norm, as in their experiments, and tensors
or rows for their buckets of consecutive entries). *float16* and *bfloat16* are rounded to nearest; float16 becomes
infinite above 65504, which a client's loss scaling has to prevent.

What is sent is returned as float32 numbers: those that the server computes from the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from attacks.registry import UsageError
from fedmjp.defenses.base import Defense

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bits an entry; largest multiple of the step.
BITS = {"sign": 1, "int4": 4, "int8": 8, "float16": 16, "bfloat16": 16}
LARGEST = {"int4": 7, "int8": 127}


@dataclass(frozen=True)
class Quantise(Defense):
    """Options of --defense quantise."""

    # They read the grid, the format or the signs from the values: one solves with the error that they leave, the other
    # then matches the whole message to that error.
    known_by: ClassVar[tuple[str, ...]] = ("patch_embedding", "gauss_newton")

    quantise_format: Literal["sign", "int4", "int8", "float16", "bfloat16"] = "int8"
    """What an entry is sent as."""
    quantise_rounding: Literal["nearest", "stochastic"] = "nearest"
    """Of int4 and int8: to the nearest value, or at random with the right expectation (QSGD)."""
    quantise_per: Literal["tensor", "row"] = "tensor"
    """Of sign, int4 and int8: one scale a parameter, or one a row (of a matrix, of a filter, of a table)."""

    @property
    def random(self) -> bool:
        """Whether entries are rounded at random."""
        return self.quantise_rounding == "stochastic"

    def validate(self) -> None:
        """Raise `UsageError` for options that do not go together."""
        if self.quantise_format not in BITS:
            raise UsageError(f"--quantise-format is one of {', '.join(BITS)}, not {self.quantise_format!r}")
        if self.random and self.quantise_format not in LARGEST:
            raise UsageError(f"--quantise-rounding stochastic rounds int4 and int8; drop it for {self.quantise_format}")
        if self.quantise_per == "row" and self.quantise_format not in (*LARGEST, "sign"):
            raise UsageError(f"--quantise-per row scales sign, int4 and int8; drop it for {self.quantise_format}")

    def on_update(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Each parameter as the server decodes it."""
        return {name: self._decoded(tensor, generator) for name, tensor in update.items()}

    def _decoded(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        if self.quantise_format == "float16":
            return tensor.half().to(tensor.dtype)
        if self.quantise_format == "bfloat16":
            return tensor.bfloat16().to(tensor.dtype)
        rows = self._rows(tensor)
        if self.quantise_format == "sign":
            return _signs(rows).reshape(tensor.shape)
        drawn = generator if self.random else None
        return _on_grid(rows, LARGEST[self.quantise_format], drawn).reshape(tensor.shape)

    def _rows(self, tensor: Tensor) -> Tensor:
        """The entries (rows, n), a scale for each row."""
        if self.quantise_per == "tensor":
            return tensor.reshape(1, -1)
        return tensor.flatten(1) if tensor.dim() in (2, 4) else tensor.reshape(-1, tensor.shape[-1])

    def bits(self, sent: Mapping[str, Tensor]) -> int:
        """Bits of all entries, and 32 for each scale."""
        own = {name: tensor for name, tensor in sent.items() if not self.freezes(name)}
        scaled = self.quantise_format in (*LARGEST, "sign")
        scales = sum(len(self._rows(tensor)) for tensor in own.values()) if scaled else 0
        return BITS[self.quantise_format] * sum(tensor.numel() for tensor in own.values()) + 32 * scales


def _signs(rows: Tensor) -> Tensor:
    """The mean magnitude of each row, with the signs of its entries; + at 0."""
    magnitude = rows.abs().mean(dim=1, keepdim=True)
    return magnitude.where(rows >= 0, -magnitude)


def _on_grid(rows: Tensor, largest: int, generator: torch.Generator | None) -> Tensor:
    """Multiples of a step a row, at most `largest` of them; rounded at random with a generator, whose device draws."""
    import torch

    step = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / largest
    if generator is None:
        return (rows / step).round() * step
    drawn = torch.rand(rows.shape, generator=generator, device=generator.device).to(rows)
    return (rows / step + drawn).floor().clamp(-largest, largest) * step
