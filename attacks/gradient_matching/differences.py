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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

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
        self.model, self.weights, self.masks = exact.model, exact.weights, exact.masks
        self.batch, self.steps, self.rate, self.images = exact.batch, exact.steps, exact.rate, exact.images
        self.names, self.head = exact.names, exact.head

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """See `Simulation`; labels are (L, B) int64."""
        found = _Gradients.apply(self, labels, images)
        return dict(zip(self.names, found, strict=True))

    def first(self, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The loss's derivatives in the weights `names`, name -> (L, *shape), and in the images (L, B, C, H, W)."""
        places = (None, 0, 0, None if self.masks is None else 0)
        with math_attention():
            return vmap(grad(self._loss, argnums=(0, 1)), in_dims=places)(self._own(), images, labels, self.masks)

    def moved(self, along: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        """The derivative in the images at weights that differ by `along`, name -> (L, *shape), in every lane."""
        weights = {name: weight + along[name] for name, weight in self._own().items()}
        places = (0, 0, 0, None if self.masks is None else 0)
        with math_attention():
            return vmap(grad(self._loss, argnums=1), in_dims=places)(weights, images, labels, self.masks)

    def step(self, along: Mapping[str, Tensor]) -> Tensor:
        """t, (L,)."""
        own = self._own()
        size = torch.stack([w.square().sum() for w in own.values()]).sum().sqrt()
        length = torch.stack([v.flatten(1).square().sum(dim=1) for v in along.values()]).sum(dim=0).sqrt()
        unit = torch.finfo(size.dtype).eps ** 0.5
        return STEP * unit * size / length.clamp(min=torch.finfo(size.dtype).tiny)

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
        away = {name: v * t.view(-1, *[1] * (v.dim() - 1)) for name, v in along.items()}
        rise = ctx.simulation.moved(away, images, labels) - slope
        return None, None, rise / t.view(-1, 1, 1, 1, 1)
