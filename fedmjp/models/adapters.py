"""Bottleneck adapters: small layers between the frozen ones of a Transformer (Houlsby et al. 2019, arXiv:1902.00751).

    z = h + U f(V h + v) + u,    V (r, D), U (D, r), f GELU, U and u zero at the start, so that z = h.

One stands behind each block's MLP, before the residual is added, as Pfeiffer et al. 2021 (arXiv:2005.00247) found to be
enough; Houlsby et al. put another behind the attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attacks.registry import UsageError

PLACE = "mlp"  # the part of a block behind which an adapter stands


class Adapter(nn.Module):
    """V, f and U.

    Args:
        width: D.
        size: r.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, size), nn.Linear(size, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return hidden + self.up(nn.functional.gelu(self.down(hidden)))


def _through_adapter(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return module.adapter(output)


def add_adapters(module: nn.Module, size: int) -> None:
    """Put an adapter behind the MLP of every block of a ViT, in place; other parameters keep their names.

    Args:
        module: with its weights loaded.
        size: r, hidden units.

    Raises:
        UsageError: the model has no such blocks, or r is not below their width.
    """
    width = getattr(module, "embed_dim", 0)
    parts = [getattr(block, PLACE) for block in getattr(module, "blocks", ()) if hasattr(block, PLACE)]
    if not parts or not width:
        raise UsageError(f"--defense adapters needs a ViT; {type(module).__name__} has no blocks with an MLP")
    if size >= width:
        raise UsageError(f"--adapter-size {size} is no bottleneck of {width} channels; pass less than {width}")
    for part in parts:
        like = next(part.parameters())
        part.adapter = Adapter(width, size).to(like)
        part.register_forward_hook(_through_adapter)
