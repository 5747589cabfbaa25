"""Simulated clients: a function from candidate images and labels to gradients, differentiable in both.

`Simulation` is the interface. `Unrolled` works for every model, and is the reference that the faster engine
(`differences`) is compared with. Second derivatives need PyTorch's mathematical attention kernel, which
`math_attention` selects.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.observation import Observation
from attacks.tokenizer import find_tokenizer, logits_of


@contextmanager
def math_attention():
    """Context in which attention has second derivatives and works under `torch.func.vmap`."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


class Simulation(ABC):
    """L simulated clients of one model, one per search (victim and restart).

    Args:
        observation: of any one of the victims.
        masks: (L, N) bool, the masked positions of each client, or None.

    Attributes:
        model: a copy of the sent model, in evaluation mode, without gradients.
        names: the parameters that the images influence and whose gradients the victims sent.
        head: name of the module whose output is the logits, or "".
        images: candidate images per client: those of the batch, or of the batches of all local steps.
    """

    def __init__(self, observation: Observation, masks: Tensor | None) -> None:
        self.model = copy.deepcopy(observation.model).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.masks = masks
        self.mask_kwargs = _mask_kwargs(observation) if masks is not None else None
        self.batch, self.steps, self.rate = observation.num_examples, observation.local_steps, observation.learning_rate
        self.images = self.batch * self.steps
        self.names: tuple[str, ...] = ()
        self.head = ""

    @abstractmethod
    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Gradients of the mean cross-entropy, summed over the local steps.

        Args:
            images: (L, B, C, H, W) normalised, B = `images`.
            labels: (L, B) int64, or (L, B, K) probabilities.

        Returns:
            For each of `names` the gradients, (L, *shape).
        """

    def logits(self, weights: Mapping[str, Tensor], images: Tensor, masks: Tensor | None) -> Tensor:
        """(B, K) of normalised images (B, C, H, W) with masks (B, N) or None."""
        extra = {} if masks is None else self.mask_kwargs(masks)
        return logits_of(functional_call(self.model, dict(weights), (images,), extra))


def _mask_kwargs(observation: Observation) -> Callable[[Tensor], dict[str, Tensor]]:
    """From a mask of positions (B, N) to the keyword arguments through which the model takes it."""
    return find_tokenizer(observation.model, observation.image_shape).mask_kwargs


class Unrolled(Simulation):
    """Exact gradients of one client after the other, by autograd through all local steps; works for every model."""

    def gradients(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """See `Simulation`."""
        clients = [self._one_client(index, x, y) for index, (x, y) in enumerate(zip(images, labels, strict=True))]
        if len(clients) == 1:  # a view instead of a copy of every gradient
            return {name: gradient[None] for name, gradient in clients[0].items()}
        return {name: torch.stack([client[name] for client in clients]) for name in self.names}

    def reached(self, images: Tensor, labels: Tensor) -> list[str]:
        """Names of the parameters that the images influence, tested with one client.

        Args:
            images: (1, B, C, H, W) normalised.
            labels: (1, B) int64.
        """
        weights = {name: w.detach().requires_grad_() for name, w in self.weights.items()}
        found = torch.autograd.grad(
            self._loss(weights, 0, images[0], labels[0], 0), weights.values(), allow_unused=True
        )
        return [name for name, gradient in zip(weights, found, strict=True) if gradient is not None]

    def _one_client(self, index: int, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = {name: w.detach() for name, w in self.weights.items()}
        weights |= {name: weights[name].requires_grad_() for name in self.names}
        total: dict[str, Tensor] = {}
        for step in range(self.steps):
            loss = self._loss(weights, index, images, labels, step)
            found = torch.autograd.grad(loss, [weights[name] for name in self.names], create_graph=True)
            for name, gradient in zip(self.names, found, strict=True):
                total[name] = total[name] + gradient if step else gradient
                weights[name] = weights[name] - self.rate * gradient
        return total

    def _loss(self, weights: Mapping[str, Tensor], index: int, images: Tensor, labels: Tensor, step: int) -> Tensor:
        part = slice(step * self.batch, (step + 1) * self.batch)
        masks = None if self.masks is None else self.masks[index].expand(self.batch, -1)
        return F.cross_entropy(self.logits(weights, images[part], masks), labels[part])
