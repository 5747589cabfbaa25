"""Distances between the simulated and the received gradient: parts that an attack composes.

Each is a frozen dataclass. Called with the simulated gradients R and the target T of L simulated clients, it returns
one number per client, (L,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from attacks.gradient_matching.gradients import Gradients, Target, dot_and_square, squared_norm
from attacks.registry import UsageError

# Below this squared norm, in units of |T|^2, the square root has no usable derivative.
TINY = 1e-24


class Distance(Protocol):
    """Distance of simulated gradients from the target.

    Attributes:
        compares_sizes: the distance of a multiple of the target is not zero.
    """

    compares_sizes: bool

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """The distance per simulated client, (L,); zero where gradient and target are equal.

        Args:
            found: simulated gradients, name -> (L, *shape).
            target: received gradients.
        """


@dataclass(frozen=True)
class SquaredL2:
    """scale sum_l |R_l - T_l|^2 (Deep Leakage from Gradients, Zhu et al. 2019, equation 4).

    Args:
        scale: factor on the distance.
        relative: in units of |T|^2, so that the optimiser's steps do not depend on the size of the gradient.
    """

    scale: float = 1.0
    relative: bool = False

    compares_sizes: ClassVar[bool] = True

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """See `Distance`."""
        gap = sum(squared_norm(r - target.values[name]) for name, r in found.items())
        return self.scale * (gap / target.total() if self.relative else gap)


@dataclass(frozen=True)
class Cosine:
    """scale (1 - <R, T> / |R| |T|) with all parameters as one vector.

    Inverting Gradients (Geiping et al. 2020, equation 4).

    Args:
        scale: factor on the distance.
    """

    scale: float = 1.0

    compares_sizes: ClassVar[bool] = False

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """See `Distance`."""
        pairs = [dot_and_square(r, target.values[name]) for name, r in found.items()]
        dot, own = (sum(numbers) for numbers in zip(*pairs, strict=True))
        return self.scale * (1 - _cosine(dot, own, target.total()))


@dataclass(frozen=True)
class LayerwiseL2:
    """scale sum_l w_l |R_l - T_l| with norms instead of squared norms.

    GradInversion (Yin et al. 2021, equation 3) and GradViT (Hatamizadeh et al. 2022).

    Args:
        scale: factor on the distance.
        weights: w_l by prefix of the parameter's name, 1 where no prefix matches.
        relative: in units of |T|.
    """

    scale: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    relative: bool = False

    compares_sizes: ClassVar[bool] = True

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """See `Distance`."""
        whole = target.total()
        lengths = {name: _length(squared_norm(r - target.values[name]), whole) for name, r in found.items()}
        total = sum(self._weight(name) * length for name, length in lengths.items())
        return self.scale * (total / whole.sqrt() if self.relative else total)

    def _weight(self, name: str) -> float:
        return next((weight for start, weight in self.weights.items() if name.startswith(start)), 1.0)


@dataclass(frozen=True)
class PositionCosine:
    """scale (1 - cosine) for the gradient of one parameter, the position embedding (APRIL, Lu et al. 2021).

    Args:
        name: name of the position embedding.
        scale: factor on the distance.
    """

    name: str
    scale: float = 1.0

    compares_sizes: ClassVar[bool] = False

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """See `Distance`.

        Raises:
            UsageError: the gradient of `name` is not matched.
        """
        if self.name not in found:
            raise UsageError(f"the update holds no usable gradient of {self.name}: there is no cosine to match")
        dot, own = dot_and_square(found[self.name], target.values[self.name])
        return self.scale * (1 - _cosine(dot, own, target.squares[self.name]))


@dataclass(frozen=True)
class Sum:
    """The sum of several distances."""

    terms: tuple[Distance, ...]

    @property
    def compares_sizes(self) -> bool:
        """See `Distance`."""
        return any(term.compares_sizes for term in self.terms)

    def __call__(self, found: Gradients, target: Target) -> Tensor:
        """See `Distance`."""
        return torch.stack([term(found, target) for term in self.terms]).sum(dim=0)


def _length(square: Tensor, scale: Tensor) -> Tensor:
    """Square root of a squared norm, of at least `TINY` times the squared norm `scale`, all (L,)."""
    return square.clamp(min=(TINY * scale).clamp(min=torch.finfo(scale.dtype).tiny)).sqrt()


def _cosine(dot: Tensor, own: Tensor, received: Tensor) -> Tensor:
    """<R, T> / |R| |T| from <R, T>, |R|^2 and |T|^2, all (L,); 0 where R or T is zero.

    By the two norms one after the other: the product of the squares of two small norms is no float32 number.
    """
    return dot / _length(own, received) / _length(received, received)
