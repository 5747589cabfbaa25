"""The derivative of the matching loss with respect to the images, without a second backward pass.

Let R(x) be the gradients of the simulated clients and V the derivative of the matching loss with respect to R. A search
needs the derivative of <R(x), V> with respect to the images x. R is the derivative of the client's loss with respect to
the weights, and derivatives commute:

    d/dx <dL/dw(x, w), V> = d/dt dL/dx(x, w + t V) at t = 0,

which is approximated by the difference of two first derivatives (Hessian-vector products have been computed in this way
since Pearlmutter 1994, there exactly). The first of them is obtained together with R. A step therefore costs two
forward and two backward passes, and no graph has to be kept for a third.

The result is approximate: the step along V balances curvature against round-off. Optimisers that use the sign or a
running mean of the derivative are not affected. L-BFGS would be, because it takes differences of derivatives itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from attacks.gradient_matching.gradients import squared_norm
from attacks.gradient_matching.unrolled import Simulation, math_attention

# |t V| in units of |w| u^(1/2), where u is the unit round-off; the first that gives the derivative is used. On small
# models, random and trained, the cosine between this derivative and the exact one is above 0.9997 between 0.003 and
# 0.03, and at 0.01 above 0.99998, for the cosine and the squared distance, from starting points far from the solution
# and close to it. A ViT-Ti trained on ImageNet curves more: 0.01 is off by 30 % there, 0.0003 by 1 %.
STEPS = (0.01, 0.001, 0.0003)


class FiniteDifferences(Simulation):
    """Simulated clients of one local step with fixed labels, differentiable with respect to the images only.

    Args:
        exact: a simulation of the same clients, from which model, masks and parameter names are taken.
        step: of the difference, one of `STEPS`.
    """

    def __init__(self, exact: Simulation, step: float) -> None:
        self.step = step
        self.model, self.weights = exact.model, exact.weights
        self.masks, self.mask_kwargs = exact.masks, exact.mask_kwargs
        self.batch, self.steps, self.rate, self.images = exact.batch, exact.steps, exact.rate, exact.images
        self.names, self.head = exact.names, exact.head

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """See `Simulation.gradients`; labels must be (L, B) int64."""
        found = _Gradients.apply(self, labels, images)
        return dict(zip(self.names, found, strict=True))

    def first_derivatives(self, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The loss's derivatives in the weights `names`, name -> (L, *shape), and in the images (L, B, C, H, W)."""
        return self._map_clients(grad(self._loss, argnums=(0, 1)), self._own(), None, images, labels)

    def shifted_image_derivative(
        self, along: Mapping[str, Tensor], t: Tensor, images: Tensor, labels: Tensor
    ) -> Tensor:
        """The loss's derivative in the images, (L, B, C, H, W), at the weights shifted by t times `along`.

        Args:
            along: direction of the shift, name -> (L, *shape).
            t: (L,).
        """
        weights = {
            name: torch.addcmul(weight, along[name], _per_client(t, weight)) for name, weight in self._own().items()
        }
        return self._map_clients(grad(self._loss, argnums=1), weights, 0, images, labels)

    def step_size(self, along: Mapping[str, Tensor]) -> Tensor:
        """The step t of the finite difference along `along` (name -> (L, *shape)), (L,)."""
        own = self._own()
        size = torch.stack([w.square().sum() for w in own.values()]).sum().sqrt()
        length = torch.stack([squared_norm(v) for v in along.values()]).sum(dim=0).sqrt()
        unit = torch.finfo(size.dtype).eps ** 0.5
        return self.step * unit * size / length.clamp(min=torch.finfo(size.dtype).tiny)

    def _map_clients(
        self,
        derivative: Callable,
        weights: Mapping[str, Tensor],
        weights_dim: int | None,
        images: Tensor,
        labels: Tensor,
    ) -> Any:
        """`derivative` of every simulated client; `weights_dim` is their dimension in the weights, None if shared."""
        with math_attention():
            if len(images) > 1:
                in_dims = (weights_dim, 0, 0, None if self.masks is None else 0)
                return vmap(derivative, in_dims=in_dims)(weights, images, labels, self.masks)
            own = weights if weights_dim is None else {name: weight[0] for name, weight in weights.items()}
            found = derivative(own, images[0], labels[0], None if self.masks is None else self.masks[0])
            return tree_map(lambda t: t[None], found)  # for a single client vmap costs more than it saves

    def _own(self) -> dict[str, Tensor]:
        return {name: self.weights[name] for name in self.names}

    def _loss(self, own: Mapping[str, Tensor], images: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        masks = None if mask is None else mask.expand(len(images), -1)
        return F.cross_entropy(self.logits(self.weights | dict(own), images, masks), labels)


class _Gradients(torch.autograd.Function):
    """Images -> gradients of every simulated client; the backward pass is described in the module's docstring."""

    @staticmethod
    def forward(ctx: Any, simulation: FiniteDifferences, labels: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        """Gradients (L, *shape), one a parameter, of L simulated clients with images (L, B, C, H, W)."""
        values, slope = simulation.first_derivatives(images.detach(), labels)
        ctx.simulation = simulation
        ctx.save_for_backward(labels, images.detach(), slope)
        return tuple(values[name] for name in simulation.names)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None, Tensor]:
        """Derivative by the images (L, B, C, H, W), from cotangents (L, *shape), one a parameter."""
        labels, images, slope = ctx.saved_tensors
        along = dict(zip(ctx.simulation.names, cotangents, strict=True))
        t = ctx.simulation.step_size(along)  # (L,)
        rise = ctx.simulation.shifted_image_derivative(along, t, images, labels) - slope
        return None, None, rise / _per_client(t, slope[0])


def _per_client(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape (L,) to (L, 1, ...), which broadcasts with tensors (L, *like.shape)."""
    return numbers.view(-1, *[1] * like.dim())
