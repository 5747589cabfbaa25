"""A linear layer with a low-rank term beside its weight (LoRA: Hu et al. 2022, arXiv:2106.09685, equation 3).

    y = W x + b + (alpha / r) B A x,    A (r, in), B (out, r), B zero at the start.

The package `peft` computes the same (a test compares them), but wraps the layer: parameters that attacks, checkpoints
and groups find by timm's names (`attn.qkv.weight`) would have others, and importing it takes seconds. Here the layer
keeps its names, and `lora_A` and `lora_B` stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.registry import UsageError

FACTORS = ("lora_A", "lora_B")


class LowRankLinear(nn.Linear):
    """A linear layer (out, in), whose parameters it takes over, plus a term of rank `rank`.

    Args:
        layer: the layer as loaded.
        rank: r.
        alpha: the term is scaled by alpha / r.

    Raises:
        UsageError: r is above the rank that the layer's weight can have.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        outputs, inputs = layer.weight.shape
        if rank > min(outputs, inputs):
            raise UsageError(
                f"--lora-rank {rank} is above the rank of a layer of {inputs} inputs and {outputs} outputs; pass at "
                f"most {min(outputs, inputs)}"
            )
        super().__init__(inputs, outputs, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, **like))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return super().forward(x) + self.scale * functional.linear(functional.linear(x, self.lora_A), self.lora_B)


def merged_weight(layer: nn.Linear) -> Tensor:
    """The matrix (out, in) that the layer applies, W + (alpha / r) B A where it has a low-rank term."""
    if not isinstance(layer, LowRankLinear):
        return layer.weight
    return layer.weight + layer.scale * layer.lora_B @ layer.lora_A


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of the same function without low-rank terms, by name: what a model without them loads."""
    terms = {n: m for n, m in module.named_modules() if isinstance(m, LowRankLinear)}
    state = {n: t for n, t in module.state_dict().items() if n.rpartition(".")[2] not in FACTORS}
    return state | {f"{name}.weight": merged_weight(layer).detach() for name, layer in terms.items()}


def add_low_rank(module: nn.Module, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Give linear layers of a model a low-rank term, in place.

    Args:
        module: with its weights loaded.
        targets: patterns of the layers' names, as the shell writes them.
        rank, alpha: of the terms.

    Raises:
        UsageError: no linear layer has such a name, or the rank is above a layer's.
    """
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        if not any(fnmatchcase(name, target) for name in layers):
            some = ", ".join(list(layers)[:3])
            raise UsageError(f"--lora-targets {target}: no linear layer of the model has this name ({some}, ...)")
    for name, layer in layers.items():
        if any(fnmatchcase(name, target) for target in targets):
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, LowRankLinear(layer, rank, alpha))
