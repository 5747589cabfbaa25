"""What an active server changes of the architecture that it sends, and how a client builds what it is sent.

A server that orders a training sends the model's definition besides its values: in a file of the model, or by names and
numbers from which the clients' program builds it, as here. Where values are sent by name, the names of the added layers
are enough (`add_sent_layers`); where all are in one array (`fedmjp.federation`), the message names what is added, as
`change_layers` reads it. A client that builds its model from neither is not attacked by this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.registry import UsageError
from attacks.tokenizer import find_tokenizer

IMPRINT = "imprint"  # name of the added layer in the model
# Its parameters; the first and the last one show in a state how many bins and levels there are.
ADDED, ANCHOR, LEVELS = f"{IMPRINT}.measure.weight", f"{IMPRINT}.anchor.weight", f"{IMPRINT}.levels"


class BinLayer(nn.Module):
    """A layer in front of the model: x + a sum_k u_k, the same number added to every pixel, of K units with

        h_k = sum_j w_kj (x - l_j) + v_k [q, 1] s,    u_k = h_k where h_k > 0 and h_{k + 1} <= 0, and zero elsewhere:

    of units that measure the same with falling offsets, only the last one that is on writes. q is the mean square of
    the input and s = sqrt(P) / 8 (`anchor_scale`). w_kj are the rows of `measure.weight`, J P numbers of each unit, v_k
    those of `anchor.weight`, l_j the `levels` and a is `written`.

    Args:
        size: P, numbers of an input.
        bins: K.
        levels: J.
        like: of whose type and device the parameters are; all are zero at the start but a, which is one.
    """

    def __init__(self, size: int, bins: int, levels: int, like: Tensor) -> None:
        super().__init__()
        self.scale = anchor_scale(size)
        self.measure = nn.Linear(levels * size, bins, bias=False, device="meta")
        self.anchor = nn.Linear(2, bins, bias=False, device="meta")
        for linear in (self.measure, self.anchor):
            linear.to_empty(device=like.device).to(like.dtype)
            nn.init.zeros_(linear.weight)
        self.levels = nn.Parameter(like.detach().new_zeros(levels))
        self.written = nn.Parameter(like.detach().new_ones(1))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        height = self.heights(images.flatten(1))
        next_is_on = functional.pad(height[:, 1:] > 0, (0, 1))
        last = functional.relu(height).masked_fill(next_is_on, 0).sum(dim=1)
        return images + (self.written * last)[:, None, None, None]

    def heights(self, flat: Tensor) -> Tensor:
        """h_k of inputs (B, P), (B, K)."""
        square = flat.square().mean(dim=1, keepdim=True)
        anchors = self.scale * torch.cat([square, torch.ones_like(square)], dim=1)
        against = (flat[:, None] - self.levels[:, None]).flatten(1)  # (B, J P)
        return self.measure(against) + self.anchor(anchors)

    def in_front(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A layer's input after this one: a hook that runs before the layer does."""
        return self(inputs[0]), *inputs[1:]


def anchor_scale(size: int) -> float:
    """s, by which a `BinLayer` scales its inputs [q, 1]: their gradients are that much further above noise, and add a
    sixty-fourth each to the square of the gradient's norm for images of unit variance.

    Args:
        size: P, numbers of an input.
    """
    return math.sqrt(size) / 8


def layers_with_bins(bins: int, levels: int = 1) -> str:
    """What a message says of a model with a `BinLayer` in front."""
    return f"{IMPRINT}={bins}" + (f"x{levels}" if levels > 1 else "")


def change_layers(model: nn.Module, image_shape: tuple[int, int, int], layers: str) -> None:
    """Change the architecture of a model as a message says, in place; its other parameters keep names and values.

    Args:
        model: a ViT.
        image_shape: (C, H, W) of an input.
        layers: "imprint=K" for a `BinLayer` of K bins in front of the patch projection, "imprint=KxJ" for one with J
            levels; "" for nothing.

    Raises:
        UsageError: no such change, a model without a patch projection, or one that has the layer already.
    """
    if not layers:
        return
    name, _, numbers = layers.partition("=")
    counts = numbers.split("x")
    if name != IMPRINT or len(counts) > 2 or not all(count.isdigit() and int(count) for count in counts):
        raise UsageError(
            f"unknown change of the architecture {layers!r}; this client builds {IMPRINT}=NUMBER OF BINS, or "
            f"{IMPRINT}=BINSxLEVELS"
        )
    if hasattr(model, IMPRINT):
        raise UsageError(f"the model has a layer called {IMPRINT} already")
    find_tokenizer(model, image_shape)
    _put_in_front(model, math.prod(image_shape), *map(int, counts))


def add_sent_layers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Add to a model, in place, the layers that it lacks and a state sent by name holds; their values are not copied.

    Args:
        model: a ViT.
        state: parameters by name.
    """
    if holds_added_layers(state) and not hasattr(model, IMPRINT):
        (bins, width), levels = state[ADDED].shape, len(state[LEVELS])
        _put_in_front(model, width // levels, bins, levels)


def holds_added_layers(state: Mapping[str, Tensor]) -> bool:
    """Whether a state sent by name holds a layer that `add_sent_layers` adds."""
    return ADDED in state and LEVELS in state


def _put_in_front(model: nn.Module, size: int, bins: int, levels: int = 1) -> None:
    """Put a `BinLayer` in front of the first convolution, which is a ViT's patch projection."""
    projection = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    layer = BinLayer(size, bins, levels, projection.weight)
    setattr(model, IMPRINT, layer)
    projection.register_forward_pre_hook(layer.in_front)
