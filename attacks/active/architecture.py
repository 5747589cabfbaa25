"""What an active server changes of the architecture that it sends, and how a client builds what it is sent.

A server that orders a training sends the model's definition besides its values: in a file of the model, or by names and
numbers from which the clients' program builds it, as here (`fedmjp.federation`: every message holds the run's
configuration). The message then names what is added, as `change_layers` reads it, and client, benchmark and attack
build the same model from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

IMPRINT = "imprint"  # name of the added layer in the model


class BinLayer(nn.Module):
    """A layer in front of the model: x + (1/K) sum_k relu(w_k [x, q] + b_k), the same number added to every pixel.

    q is the mean square of the input. Of a linear layer's gradient the columns of w_k are sums over the images of the
    input, so that q's column gives the sum of their mean squares (`attacks.active.imprint` says what for).

    Args:
        size: P, numbers of an input.
        bins: K.
        like: of whose type and device the parameters are; they are zero at the start.
    """

    def __init__(self, size: int, bins: int, like: Tensor) -> None:
        super().__init__()
        self.measure = nn.Linear(size + 1, bins, device="meta")
        self.measure.to_empty(device=like.device).to(like.dtype)
        for parameter in self.measure.parameters():
            nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        flat = images.flatten(1)
        active = functional.relu(self.measure(torch.cat([flat, flat.square().mean(dim=1, keepdim=True)], dim=1)))
        return images + active.mean(dim=1)[:, None, None, None]

    def in_front(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A layer's input after this one: a hook that runs before the layer does."""
        return self(inputs[0]), *inputs[1:]


def layers_with_bins(bins: int) -> str:
    """What a message says of a model with a `BinLayer` in front."""
    return f"{IMPRINT}={bins}"


def change_layers(model: nn.Module, image_shape: tuple[int, int, int], layers: str) -> None:
    """Change the architecture of a model as a message says, in place; its other parameters keep names and values.

    Args:
        model: a ViT.
        image_shape: (C, H, W) of an input.
        layers: "imprint=K" for a `BinLayer` of K bins in front of the patch projection; "" for nothing.

    Raises:
        UsageError: no such change, a model without a patch projection, or one that has the layer already.
    """
    if not layers:
        return
    name, _, bins = layers.partition("=")
    if name != IMPRINT or not bins.isdigit() or not int(bins):
        raise UsageError(f"unknown change of the architecture {layers!r}; this client builds {IMPRINT}=NUMBER OF BINS")
    if hasattr(model, IMPRINT):
        raise UsageError(f"the model has a layer called {IMPRINT} already")
    projection = model.get_submodule(find_tokenizer(model, image_shape).weight.rpartition(".")[0])
    channels, height, width = image_shape
    layer = BinLayer(channels * height * width, int(bins), projection.weight)
    setattr(model, IMPRINT, layer)
    projection.register_forward_pre_hook(layer.in_front)
