"""Find the first attention layer of a ViT: its query, key and value weights, and the norm before them.

Layers are recognised by name, for timm (one fused `qkv`), torchvision (`in_proj_weight`) and Hugging Face (three
projections).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attacks.registry import UsageError

# Names that ViT implementations use for the norms before the attention and before the MLP.
PRE_NORMS = ("norm1", "ln_1", "layernorm_before")
MLP_NORMS = ("norm2", "ln_2", "layernorm_after")


@dataclass(frozen=True)
class FirstAttention:
    """Names of the first attention layer's parameters.

    Attributes:
        weights: names of one fused matrix (3 D, D) or of three (D, D): query, key, value. In both cases
            W_q^T dW_q + W_k^T dW_k + W_v^T dW_v is the sum of W^T dW over the named matrices.
        norm: name of the module that normalises the attention's input, or None.
        mlp: names of the weights of the linear layers of the same block outside its attention, in their order; empty
            where there is no norm to tell the block by.
        mlp_norm: name of the module that normalises the MLP's input, or None.
    """

    weights: tuple[str, ...]
    norm: str | None
    mlp: tuple[str, ...] = ()
    mlp_norm: str | None = None


def find_first_attention(model: nn.Module, width: int) -> FirstAttention:
    """Find the first attention layer of a ViT.

    Args:
        model: timm, torchvision or Hugging Face ViT.
        width: D, channels of a token.

    Raises:
        UsageError: the model has no attention over `width` channels.
    """
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and p.shape[1] == width]
    fused = next((n for n in names if n.endswith(("qkv.weight", "in_proj_weight"))), None)
    query = next((n for n in names if n.endswith(("query.weight", "q_proj.weight"))), None)
    first = fused or query
    if first is None:
        raise UsageError(f"no query, key and value projections over {width} channels found in {type(model).__name__}")
    modules = dict(model.named_modules())
    path = first.split(".")
    blocks = [".".join(path[:i]) for i in range(len(path) - 1, 0, -1)]
    norm = next((f"{b}.{n}" for b in blocks for n in PRE_NORMS if f"{b}.{n}" in modules), None)
    weights = (fused,) if fused else _siblings(query)
    if norm is None:
        return FirstAttention(weights, None)
    block = norm.rpartition(".")[0]
    second = next((f"{block}.{n}" for n in MLP_NORMS if f"{block}.{n}" in modules), None)
    return FirstAttention(weights, norm, _outside_attention(model, block, first), second)


def _outside_attention(model: nn.Module, block: str, first: str) -> tuple[str, ...]:
    """Weights of the block's linear layers that are not in the submodule that holds the parameter `first`."""
    attention = f"{block}.{first.removeprefix(f'{block}.').partition('.')[0]}."
    names = [n for n, module in model.named_modules() if n.startswith(f"{block}.") and isinstance(module, nn.Linear)]
    return tuple(f"{n}.weight" for n in names if not n.startswith(attention))


def _siblings(query: str) -> tuple[str, ...]:
    kinds = ("query", "key", "value") if "query" in query else ("q_proj", "k_proj", "v_proj")
    return tuple(query.replace(kinds[0], kind) for kind in kinds)


def name_of_block(model: nn.Module, number: int) -> str:
    """Name of a block under timm's names, of a ViT or of a model that holds one as a part.

    Args:
        number: from 0.

    Returns:
        "blocks.0", say, or "vit.blocks.0"; the first where the model holds no blocks, so that nothing has such a name.
    """
    named = (name for name, _ in model.named_modules() if name.rpartition(".")[2] == "blocks")
    return f"{next(named, 'blocks')}.{number}"


def input_factor(model: nn.Module, weight: str) -> str | None:
    """Name of the factor A (r, D) of a low-rank term (LoRA) beside a layer's weight; None where there is none."""
    name = f"{weight.removesuffix('weight')}lora_A"
    return name if name in dict(model.named_parameters()) else None
