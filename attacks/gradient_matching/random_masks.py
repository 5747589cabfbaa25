"""Simulated clients that train with dropout or stochastic depth: the mean of their gradients over random masks.

A client in training mode draws masks that no message holds. The attack cannot repeat them, and matches the expectation
of the gradient over them instead, estimated from a few masks that are drawn anew at every evaluation (expectation over
transformations, Athalye et al. 2018, arXiv:1707.07397). The Dropout Inversion Attack (Scheliga et al. 2022,
arXiv:2208.06163) optimises the masks together with the images; this does not.

Closed forms that read the position rows and the patch projection need none of this: both gradients have passed through
the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attacks.gradient_matching.unrolled import Simulation, Unrolled
from attacks.registry import UsageError


def drop_rate(module: nn.Module) -> float:
    """Probability that the layer drops a unit (dropout) or a branch (stochastic depth) in training; 0 for others."""
    rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "drop_prob", 0.0)
    return rate if isinstance(rate, float) else 0.0


class MaskedClients(Simulation):
    """Simulated clients whose gradients are means over random masks.

    Args:
        exact: a simulation of the same clients in evaluation mode; its model, weights and masks are shared.
        draws: masks a gradient, at least 1.
        seed: of the masks; every call of `gradients` draws others.

    Raises:
        UsageError: no layer of the model drops anything in training.
    """

    def __init__(self, exact: Unrolled, draws: int, seed: int) -> None:
        if not any(drop_rate(module) for module in exact.model.modules()):
            raise UsageError("mask_draws: no layer of the model drops anything in training; leave it at 0")
        self.exact, self.draws = exact, draws
        self.model, self.weights = exact.model, exact.weights
        self.masks, self.mask_kwargs = exact.masks, exact.mask_kwargs
        self.batch, self.steps, self.rate, self.images = exact.batch, exact.steps, exact.rate, exact.images
        self.names, self.head = exact.names, exact.head
        self._generator = torch.Generator().manual_seed(seed)

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """See `Simulation`."""
        seed = int(torch.randint(2**62, (), generator=self._generator))
        total: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []), training(self.model):
            torch.manual_seed(seed)
            for _ in range(self.draws):
                found = self.exact.gradients(images, labels)
                total = {name: total[name] + g if total else g for name, g in found.items()}
        return {name: gradient / self.draws for name, gradient in total.items()}


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Context in which a model in evaluation mode drops units and branches; batch norms keep their statistics."""
    for module in model.modules():
        module.training = not isinstance(module, nn.modules.batchnorm._BatchNorm)
    try:
        yield
    finally:
        model.eval()
