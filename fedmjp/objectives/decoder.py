"""DropPos' decoder: blocks without positions between the encoder and the logits over places."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn


class PlaceDecoder(nn.Module):
    """Projection, blocks, norm and a linear layer to places, as in the published code (decoder_embed ... decoder_pred).

    Args:
        width: D, channels of the encoder.
        decoder_width: channels of the blocks.
        depth: number of blocks.
        heads: of their attention.
        places: N.
    """

    def __init__(self, width: int, decoder_width: int, depth: int, heads: int, places: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, decoder_width)
        self.blocks = nn.Sequential(*(Block(decoder_width, heads, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(decoder_width)
        self.predict = nn.Linear(decoder_width, places)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits over places of every token: (B, T, D) -> (B, T, N)."""
        return self.predict(self.norm(self.blocks(self.embed(tokens))))


def _initialise(module: nn.Module) -> None:
    """timm's start of a ViT's linear layers."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        with torch.no_grad():
            module.bias.zero_()
