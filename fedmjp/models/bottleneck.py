"""A variational bottleneck in front of a classifier (Scheliga, Mäder and Seeland, "PRECODE - A Generic Model Extension
to Prevent Deep Gradient Leakage", WACV 2022).

A linear encoder maps the representation r (B, D) to mean mu and deviation sigma = softplus(.) of a Gaussian over k
channels; z = mu + sigma * noise is drawn from it, and a linear decoder maps z back to D channels, which the classifier
reads. Departs from the published code, which samples in evaluation too: here evaluation uses mu, so that the same
weights give the same accuracy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class VariationalBottleneck(nn.Module):
    """Encoder, sample, decoder.

    Args:
        width: D, channels of the representation.
        size: k, channels of the sample.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(width, 2 * size), nn.Linear(size, width)
        self._divergence: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """The representation (B, D) after the bottleneck; in training a sample, by torch's global random numbers."""
        mean, deviation = self.encode(features).chunk(2, dim=-1)  # (B, k) each
        if not self.training:
            return self.decode(mean)
        deviation = functional.softplus(deviation)
        self._divergence = gaussian_divergence(mean, deviation).mean()
        return self.decode(mean + deviation * torch.randn_like(deviation))

    def in_front(self, classifier: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The classifier's input after the bottleneck: a hook that runs before the classifier does."""
        return self(inputs[0]), *inputs[1:]

    def take_divergence(self) -> Tensor:
        """Mean over the batch of the divergence of the last forward pass in training, a scalar in bits; forgets it.

        Raises:
            RuntimeError: there was no such pass since the last call.
        """
        divergence, self._divergence = self._divergence, None
        if divergence is None:
            raise RuntimeError("the bottleneck's divergence is that of a forward pass in training, and there was none")
        return divergence

    def __getstate__(self) -> dict[str, Any]:
        """What is copied of the bottleneck: all but the divergence, whose graph cannot be."""
        return self.__dict__ | {"_divergence": None}


def gaussian_divergence(mean: Tensor, deviation: Tensor) -> Tensor:
    """Kullback-Leibler divergence of N(mean, deviation^2) from N(0, 1) in bits, summed over channels: (B, k) -> (B,).

    As in the published code; in nats it would be ln 2 times that.
    """
    nats = 0.5 * (mean.square() + deviation.square() - 1) - deviation.log()
    return nats.sum(dim=-1) / torch.log(torch.tensor(2.0))


def insert_bottleneck(module: nn.Module, classifier: str, size: int) -> None:
    """Register a bottleneck as `module.bottleneck` in front of the linear layer called `classifier`."""
    layer = module.get_submodule(classifier)
    module.bottleneck = VariationalBottleneck(layer.in_features, size)
    layer.register_forward_pre_hook(module.bottleneck.in_front)
