"""The loss's derivative in the images without a second backward pass.

What a search needs of the gradients R(x) of simulated clients is, for the derivative V of its loss in them, the
derivative of <R(x), V> in the images x. R is the derivative of the client's loss in the weights, and derivatives
commute:

    d/dx <dL/dw(x, w), V> = d/dt dL/dx(x, w + t V) at t = 0,

which is the difference of two ordinary first derivatives (the device by which Hessian-vector products have been taken
since Pearlmutter 1994, there exactly). The first of them falls out where R is computed. So a step costs two forward and
backward passes, and nothing has to be kept for a third.

It is an approximation: the step along V is a compromise between curvature and round-off. Methods that follow the sign
or a running mean of the derivative do not notice; L-BFGS, which takes differences of derivatives itself, would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from attacks.gradient_matching.gradients import square
from attacks.gradient_matching.unrolled import Simulation, math_attention

# |t V| in units of |w| u^(1/2), u the unit round-off. Between 0.003 and 0.03 the derivative has a cosine above 0.9997
# to the exact one, and at 0.01 above 0.99998: cosine and squared distance, random weights and trained ones, starts far
# from the answer and close to it.
STEP = 0.01


class Differenced(Simulation):
    """Simulated clients of one local step with fixed labels; what comes out is differentiable in the images alone.

    Args:
        exact: simulates the same clients; gives model, masks and names.
    """

    def __init__(self, exact: Simulation) -> None:
        self.model, self.weights = exact.model, exact.weights
        self.masks, self.mask_argument = exact.masks, exact.mask_argument
        self.batch, self.steps, self.rate, self.images = exact.batch, exact.steps, exact.rate, exact.images
        self.names, self.head = exact.names, exact.head

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """See `Simulation`; labels are (L, B) int64."""
        found = _Gradients.apply(self, labels, images)
        return dict(zip(self.names, found, strict=True))

    def first(self, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The loss's derivatives in the weights `names`, name -> (L, *shape), and in the images (L, B, C, H, W)."""
        return self._each(grad(self._loss, argnums=(0, 1)), self._own(), None, images, labels)

    def moved(self, along: Mapping[str, Tensor], t: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The derivative in the images at weights that differ by t (L,) times `along`, name -> (L, *shape)."""
        weights = {
            name: torch.addcmul(weight, along[name], _lanewise(t, weight)) for name, weight in self._own().items()
        }
        return self._each(grad(self._loss, argnums=1), weights, 0, images, labels)

    def step(self, along: Mapping[str, Tensor]) -> Tensor:
        """t, (L,)."""
        own = self._own()
        size = torch.stack([w.square().sum() for w in own.values()]).sum().sqrt()
        length = torch.stack([square(v) for v in along.values()]).sum(dim=0).sqrt()
        unit = torch.finfo(size.dtype).eps ** 0.5
        return STEP * unit * size / length.clamp(min=torch.finfo(size.dtype).tiny)

    def _each(
        self, slope: Callable, weights: Mapping[str, Tensor], lane: int | None, images: Tensor, labels: Tensor
    ) -> Any:
        """`slope` of every lane; `lane` is the dimension of lanes in the weights, None where they share them."""
        with math_attention():
            if len(images) > 1:
                places = (lane, 0, 0, None if self.masks is None else 0)
                return vmap(slope, in_dims=places)(weights, images, labels, self.masks)
            own = weights if lane is None else {name: weight[0] for name, weight in weights.items()}
            found = slope(own, images[0], labels[0], None if self.masks is None else self.masks[0])
            return tree_map(lambda t: t[None], found)  # mapping over a single lane costs more than it is worth

    def _own(self) -> dict[str, Tensor]:
        return {name: self.weights[name] for name in self.names}

    def _loss(self, own: Mapping[str, Tensor], images: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        masks = None if mask is None else mask.expand(len(images), -1)
        return F.cross_entropy(self.logits(self.weights | dict(own), images, masks), labels)


class _Gradients(torch.autograd.Function):
    """Images -> gradients of every lane; backward as the module's docstring tells."""

    @staticmethod
    def forward(ctx: Any, simulation: Differenced, labels: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        values, slope = simulation.first(images.detach(), labels)
        ctx.simulation = simulation
        ctx.save_for_backward(labels, images.detach(), slope)
        return tuple(values[name] for name in simulation.names)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None, Tensor]:
        labels, images, slope = ctx.saved_tensors
        along = dict(zip(ctx.simulation.names, cotangents, strict=True))
        t = ctx.simulation.step(along)  # (L,)
        rise = ctx.simulation.moved(along, t, images, labels) - slope
        return None, None, rise / _lanewise(t, slope[0])


def _lanewise(numbers: Tensor, like: Tensor) -> Tensor:
    """(L,) to (L, 1, ...), to go with tensors (L, *like.shape)."""
    return numbers.view(-1, *[1] * like.dim())
