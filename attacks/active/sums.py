"""One client out of a sum over several, by sending the others a model that keeps silent.

Pasquini et al. 2022, "Eluding Secure Aggregation in Federated Learning via Model Inconsistency". Secure aggregation
shows the server the sum of the clients' updates, and does not show the clients that they were sent different models.
All but one are sent weights of zero: features and classifier are zero, so that every gradient but that of the
classifier's bias is exactly zero, in every local step, and weights come back as zeros. The sum below the classifier is
the update of the one client.

The biases' gradients add up, and with them the counts of the clients' labels. Where one step is taken, the client that
is attacked therefore has a feature that is 1 for all of its images: that column of the classifier's gradient is its own
dL/db.

Departs from the paper: there the others' units are dead below the classifier (ReLU), here all weights are zero, which
any architecture has, and keeps every digit of returned weights in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attacks.active.held import find_end

CONSTANT = 0  # the feature that is set to 1


def silent(sent: Mapping[str, Tensor], kept: str) -> dict[str, Tensor]:
    """The weights for the clients of a sum that are not attacked.

    Args:
        sent: parameters by name, of the client that is.
        kept: name of the classifier's bias, which stays: whose images are counted together has one softmax.
    """
    return {name: value if name == kept else torch.zeros_like(value) for name, value in sent.items()}


def with_constant(
    model: nn.Module, image_shape: tuple[int, int, int], layer: str, changes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A prepared classifier that reads nothing of the feature `CONSTANT`, and a last norm that makes it 1.

    Args:
        image_shape: (C, H, W).
        layer: name of the classifier.
        changes: what is sent instead of the model's parameters, by name, with the classifier's weight.

    Raises:
        UsageError: the classifier reads no LayerNorm's output.
    """
    name = find_end(model, image_shape, layer).norm
    norm = model.get_submodule(name)
    weight = changes[f"{layer}.weight"].clone()
    length = weight.norm()
    weight[:, CONSTANT] = 0
    scale, shift = norm.weight.detach().clone(), norm.bias.detach().clone()
    scale[CONSTANT], shift[CONSTANT] = 0, 1
    return {
        **changes,
        f"{layer}.weight": weight * (length / weight.norm()),
        f"{name}.weight": scale,
        f"{name}.bias": shift,
    }
