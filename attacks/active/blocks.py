"""The layers of a ViT's blocks by name, for servers that set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from attacks.attention import find_first_attention
from attacks.registry import UsageError


@dataclass(frozen=True)
class Block:
    """Names of a block's layers.

    Attributes:
        norm, qkv, output: before the attention, its fused matrix, its output projection.
        mlp_norm, first, second: before the MLP, its two linear layers.
    """

    norm: str
    qkv: str
    output: str
    mlp_norm: str
    first: str
    second: str


def blocks_of(model: nn.Module, width: int) -> list[Block]:
    """The blocks of a ViT in their order.

    Args:
        width: D.

    Raises:
        UsageError: the first block is not a fused attention with an output projection and an MLP of two layers, each
            behind a norm, as timm builds it.
    """
    found, own = find_first_attention(model, width), dict(model.named_modules())
    attention = found.weights[0].rpartition(".")[0].rpartition(".")[0]
    output = f"{attention}.proj"
    mlp = tuple(name.removesuffix(".weight") for name in found.mlp if ".adapter." not in name)
    if len(found.weights) != 1 or found.norm is None or found.mlp_norm is None or len(mlp) != 2 or output not in own:
        raise UsageError(
            f"the first block of {type(model).__name__} is not a fused attention with an output projection and an MLP "
            "of two layers, each behind a norm: nothing here sets another one"
        )
    first = Block(found.norm, found.weights[0].rpartition(".")[0], output, found.mlp_norm, *mlp)
    stem = found.norm.rpartition(".")[0].rpartition(".")[0]
    names = [f"{stem}.{number}." for number in range(len(own[stem]))]
    return [Block(*(getattr(first, f.name).replace(names[0], name, 1) for f in fields(Block))) for name in names]


def parameters_of(model: nn.Module, *layers: str) -> dict[str, Tensor]:
    """The parameters of layers, by name in the model."""
    return {
        f"{layer}.{name}": value
        for layer in layers
        for name, value in model.get_submodule(layer).named_parameters(recurse=False)
    }


def zeros_in(model: nn.Module, *layers: str) -> dict[str, Tensor]:
    """Zeros for every parameter of layers, by name."""
    return {name: torch.zeros_like(value) for name, value in parameters_of(model, *layers).items()}


def plain_norms(model: nn.Module, *norms: str) -> dict[str, Tensor]:
    """Norms that neither scale nor shift, by name of the parameter."""
    parameters: Mapping[str, Tensor] = parameters_of(model, *norms)
    return {n: torch.ones_like(p) if n.endswith("weight") else torch.zeros_like(p) for n, p in parameters.items()}


def same_direction(like: Tensor, norm: float) -> Tensor:
    """A weight (out, in) whose columns are one random vector of this norm."""
    direction = torch.randn(len(like), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (norm * direction / direction.norm())[:, None].expand_as(like).to(like)
