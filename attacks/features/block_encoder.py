"""The sent model from patches to what the MLP of one of its blocks receives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.attention import name_of_block
from attacks.mjp.token_duals import normalised
from attacks.registry import UsageError
from attacks.tokenizer import Tokenizer


class _Reached(Exception):
    """The forward pass has come to the block's second norm."""


class BlockEncoder:
    """Patches -> the tokens at the second norm of a block, up to what that norm takes away.

    Args:
        model: as sent; it is not changed.
        tokenizer: of the model.
        number: of the block, from 0.
        dtype: of the computation.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, number: int, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.norm = model.get_submodule(f"{name_of_block(model, number)}.norm2")
        tensors = (*model.named_parameters(), *model.named_buffers())
        self.tensors = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in tensors}

    def __call__(self, patches: Tensor) -> Tensor:
        """(B, N', D), each of mean 0 and length D^1/2, prefix tokens first, of patches (B, N, P), normalised.

        Raises:
            UsageError: `forward` does not call the block.
        """
        kept: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            """Keep the norm's input; what comes after it is not computed."""
            kept.append(inputs[0])
            raise _Reached

        handle = self.norm.register_forward_pre_hook(keep)
        try:
            functional_call(self.model, self.tensors, (self.tokenizer.unpatchify(patches),))
        except _Reached:
            return normalised(kept[0].flatten(0, 1)).view(kept[0].shape)
        finally:
            handle.remove()
        raise UsageError(f"the forward pass of {type(self.model).__name__} does not call the block's second norm")
