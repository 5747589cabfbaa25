"""A classifier of which all rows but one are zero, and what its gradient says of a batch of any size.

For an image with features h the cross-entropy of the logits W h + b has the gradient

    dL/dh = sum_c (p_c - y_c) w_c / B,    p = softmax(W h + b),    B images in the batch.

Where all rows but w_t are zero it is (p_t - y_t) w_t / B. How much an image sends to every layer below is decided by
p_t alone: nothing where p_t = 0 and its class is another one, nothing where p_t = 1 and its class is t. The logits of
the other classes are their biases, the same for every image, so that dL/db_c = p_c - n_c / B gives the number n_c of
images of each class as long as p_t is 0 or 1 for all of them: the labels of the batch need not be known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.classifier import classifier_of
from attacks.observation import Observation
from attacks.registry import UsageError

# Least classes: with two, one row of zeros leaves the other alone, and a bias gradient of one number.
LEAST_CLASSES = 2


@dataclass(frozen=True)
class SetHead:
    """A classifier of zeros but for one row, as a client was sent it.

    Attributes:
        layer: its name in the model.
        row: class t of the row.
        direction: (D,) float64, the row w_t.
        bias: (K,) float64.
    """

    layer: str
    row: int
    direction: Tensor
    bias: Tensor

    def row_gradient(self, observation: Observation) -> tuple[Tensor, float]:
        """The gradients of w_t, (D,) float64, and of b_t.

        Over the classes dL/db sums to zero. It is read from the other classes, because returned weights have no digits
        left for the change of a bias as far from zero as b_t.
        """
        weight = observation.gradient_of(f"{self.layer}.weight")[self.row].double()
        bias = observation.gradient_of(f"{self.layer}.bias").double()
        return weight, -float(self.others(bias).sum())

    def others(self, values: Tensor) -> Tensor:
        """(K,) without the entry of class t."""
        return torch.cat([values[: self.row], values[self.row + 1 :]])

    def class_counts(self, observation: Observation) -> Tensor:
        """Images of each class in the batch of one step, (K,) int64; right where p_t is 0 or 1 for all of them."""
        bias = observation.gradient_of(f"{self.layer}.bias").double()
        share = self.bias.softmax(dim=0).to(bias)
        below = share - bias
        below[self.row] = share[self.row] - self.row_gradient(observation)[1]
        return (observation.num_examples * below).round().long().clamp(min=0)


def find_head(model: nn.Module, image_shape: tuple[int, int, int]) -> str:
    """Name of the model's classifier.

    Raises:
        UsageError: its logits are no linear layer's output, or that layer has no bias or fewer than two classes.
    """
    layer = classifier_of(model, image_shape)
    if layer is None:
        raise UsageError("the model's logits are not the output of one linear layer, so that no classifier can be set")
    head = model.get_submodule(layer)
    if head.bias is None or len(head.weight) < LEAST_CLASSES:
        raise UsageError(f"the classifier {layer} needs a bias and at least {LEAST_CLASSES} classes to be set")
    return layer


def read_head(observation: Observation, layer: str) -> SetHead:
    """The classifier of an update's model.

    Args:
        layer: its name.

    Raises:
        UsageError: the model was not prepared: more rows than one are not zero.
    """
    head = observation.model.get_submodule(layer)
    rows = head.weight.detach().abs().amax(dim=1).nonzero()[:, 0]
    if len(rows) != 1:
        raise UsageError(
            "the model that the client was sent was not prepared for this attack; name it in --attacks and grant "
            "active_parameters, so that the server sends what it sets"
        )
    row = int(rows[0])
    return SetHead(layer, row, head.weight[row].detach().double(), head.bias.detach().double())


def unit_direction(width: int, seed: int = 0) -> Tensor:
    """A random direction of the features, (D,) float64 of length 1."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return direction / direction.norm()
