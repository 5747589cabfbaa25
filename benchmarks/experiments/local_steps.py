"""What clients of several benchmarks send after training locally: weights after steps of PyTorch's own optimisers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attacks import Observation
from fedmjp.models import BuiltModel

Batches = Sequence[tuple[Tensor, Tensor]]


def one_by_one(images: Tensor, labels: Tensor) -> Batches:
    """Batches of one image, (1, C, H, W) with (1,) each."""
    return list(zip(images.split(1), labels.split(1), strict=True))


def returned(
    built: BuiltModel,
    batches: Batches,
    make: Callable[..., torch.optim.Optimizer],
    rate: float,
    summed: int | None = None,
) -> Observation:
    """The update of a client that takes a step on each batch and sends its weights after the last `summed`.

    Args:
        batches: images (B, C, H, W) in [0, 1] and labels (B,) int64 of each step.
        make: the optimiser of some parameters.
        rate: learning rate, with which the server turns weights into a gradient.
        summed: steps between the model that the server has sent and the one that comes back; all by default.
    """
    summed = len(batches) if summed is None else summed
    module = copy.deepcopy(built.module).train()
    optimiser = make(module.parameters(), lr=rate)
    for step, (images, labels) in enumerate(batches):
        if step == len(batches) - summed:
            sent = copy.deepcopy(module).eval()
        optimiser.zero_grad()
        with torch.enable_grad():
            cross_entropy(module(built.normalise(images)), labels).backward()
        optimiser.step()
    after = dict(module.named_parameters())
    return Observation(
        {n: ((p - after[n]) / rate).detach() for n, p in sent.named_parameters()},
        sent,
        num_examples=len(batches[-1][0]),
        image_shape=tuple(batches[-1][0].shape[1:]),
        mean=tuple(built.mean),
        std=tuple(built.std),
        kind="weights",
        local_steps=summed,
        learning_rate=rate,
    )
