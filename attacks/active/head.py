"""A classifier of which all rows but one are equal, and what its gradient says of a batch of any size.

For an image with features h the cross-entropy of the logits W h + b has the gradient

    dL/dh = sum_c (p_c - y_c) w_c / B,    p = softmax(W h + b),    B images in the batch.

Where all rows but w_t are zero (or equal, and w_t is the difference) it is (p_t - y_t) w_t / B. How much an image sends
to every layer below is decided by
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
    """A classifier whose rows are equal but for one, as a client was sent it.

    Attributes:
        layer: its name in the model.
        row: class t of the row.
        direction: (D,) float64, the row w_t less the others'.
        bias: (K,) float64.
        held: the others are not zero, so that local steps leave them equal (`attacks.active.held`).
        constant: the feature that is 1 for every image of this client, and 0 for those of other clients in the same
            sum (`attacks.active.sums`); None where none is set.
    """

    layer: str
    row: int
    direction: Tensor
    bias: Tensor
    held: bool = False
    constant: int | None = None

    def is_in(self, observation: Observation) -> bool:
        """Whether the update holds what `row_gradient` reads; clients may withhold it."""
        return all(f"{self.layer}.{part}" in observation.gradients for part in ("weight", "bias"))

    def bias_gradient(self, observation: Observation) -> Tensor:
        """dL/db of this client's images, (K,) float64: of its own column, where one is set."""
        if self.constant is None or self.held:
            return observation.gradient_of(f"{self.layer}.bias").double()
        return observation.gradient_of(f"{self.layer}.weight")[:, self.constant].double()

    def row_gradient(self, observation: Observation) -> tuple[Tensor, float]:
        """The gradients of w_t, (D,) float64, and of b_t.

        Over the classes dL/db sums to zero. It is read from the other classes, because returned weights have no digits
        left for the change of a bias as far from zero as b_t; of a held classifier it is the anchor's that has none.

        Raises:
            UsageError: the update does not hold them.
        """
        weight = observation.gradient_of(f"{self.layer}.weight")[self.row].double()
        bias = self.bias_gradient(observation)
        return weight, float(bias[self.row]) if self.held else -float(self.others(bias).sum())

    def others(self, values: Tensor) -> Tensor:
        """(K,) without the entry of class t."""
        return torch.cat([values[: self.row], values[self.row + 1 :]])

    def moved(self, observation: Observation) -> bool:
        """Whether the rows of a held classifier came back with differences that they were not sent with."""
        weight = observation.gradients.get(f"{self.layer}.weight")
        if not self.held or weight is None:
            return False
        others = torch.cat([weight[: self.row], weight[self.row + 1 :]])
        return bool((others != others[0]).any())

    def class_counts(self, observation: Observation, adaptive: bool = False) -> Tensor:
        """Images of each class in all local steps together, (K,) int64; right where p_t is 0 or 1 for all of them.

        Of several steps it takes a held classifier. Momentum counts the images of early steps for more than those of
        late ones.

        Args:
            adaptive: the client's optimiser divides by the size of a gradient: 1 for every class that it holds, as far
                as that shows (not for the anchor).
        """
        bias = self.bias_gradient(observation)
        share = self.bias.softmax(dim=0).to(bias)
        if self.held:
            anchor, steps = int(share.argmax()), observation.local_steps
            below = -bias
            below[anchor] = 0
            if adaptive:
                return (below > 1e-3 * below.max()).long()
            below *= min(1.0, steps / max(float(below.sum()), 1e-12))
            below[anchor] = steps - below.sum()
        else:
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


def read_head(observation: Observation, layer: str, constant: int | None = None) -> SetHead:
    """The classifier of an update's model.

    Args:
        layer: its name.
        constant: see `SetHead`.

    Raises:
        UsageError: the model was not prepared: more rows than one differ from the others.
    """
    head = observation.model.get_submodule(layer)
    weight = head.weight.detach()
    rows, held = weight.any(dim=1).nonzero()[:, 0], False
    if len(rows) == len(weight) > LEAST_CLASSES:
        common = weight[1] if bool((weight[1] == weight[2]).all()) else weight[0]
        rows, held, weight = (weight != common).any(dim=1).nonzero()[:, 0], True, weight - common
    if len(rows) != 1:
        raise UsageError(
            "the model that the client was sent was not prepared for this attack; name it in --attacks and grant "
            "active_parameters, so that the server sends what it sets"
        )
    row = int(rows[0])
    return SetHead(layer, row, weight[row].double(), head.bias.detach().double(), held, constant)


def unit_direction(width: int, seed: int = 0) -> Tensor:
    """A random direction of the features, (D,) float64 of length 1."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return direction / direction.norm()
