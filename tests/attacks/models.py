"""Small Vision Transformers of the libraries and layouts that the attacks are held to read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional


def timm_vit(**options) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=5, **options
    )


def torchvision_vit() -> nn.Module:
    """Its classifier starts at zero, as torchvision's does."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 48, 96, num_classes=5)


def hugging_face_vit(kind: str = "ViT") -> nn.Module:
    """Of the architecture `kind`: ViT or DeiT."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def hugging_face_deit() -> nn.Module:
    return hugging_face_vit("DeiT")


class Block(nn.Module):
    """A pre-norm block without what newer versions of timm added (norms of queries and keys, layer scale)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn.num_heads, self.attn.scale = heads, (width // heads) ** -0.5
        self.mlp = nn.Sequential()
        for name, layer in (("fc1", nn.Linear(width, 4 * width)), ("act", nn.GELU())):
            self.mlp.add_module(name, layer)
        self.mlp.add_module("fc2", nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        heads = self.attn.num_heads
        qkv = self.attn.qkv(self.norm1(tokens)).reshape(batch, count, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = ((qkv[0] @ qkv[1].mT) * self.attn.scale).softmax(dim=-1) @ qkv[2]
        tokens = tokens + self.attn.proj(mixed.transpose(1, 2).reshape(batch, count, width))
        return tokens + self.mlp(self.norm2(tokens))


class Localisation(nn.Module):
    """The released localisation head: all positions (1, 1 + N, D) and visible patches (1, N) -> places, predictions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, positions: Tensor | nn.Embedding, visible: Tensor) -> tuple[Tensor, Tensor]:
        shown = visible[0].nonzero()[:, 0]
        side = round(visible.shape[1] ** 0.5)
        table = positions.weight[None] if isinstance(positions, nn.Embedding) else positions
        return torch.stack([shown // side, shown % side], dim=1).float()[None], self.layers(table[:, shown + 1])


class ReleasedMJP(nn.Module):
    """The layout of MJP's released code: one embedding of class token, patches and the shared row of masked patches.

    Args:
        localised: with the head of the localisation loss.
    """

    def __init__(self, localised: bool = False, width: int = 96, image_size: int = 32, patch_size: int = 8) -> None:
        super().__init__()
        count = (image_size // patch_size) ** 2
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, patch_size, patch_size)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed, self.unk_embed_index = nn.Embedding(count + 2, width), count + 1
        self.dlocr = Localisation(width) if localised else None
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, images: Tensor, unk_mask: Tensor | None = None) -> SimpleNamespace:
        patches = self.patch_embed.proj(images).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1)
        order = torch.arange(tokens.shape[1], device=images.device)[None]
        if unk_mask is not None:
            order = order * (1 - unk_mask) + unk_mask * self.unk_embed_index
        tokens = tokens + self.pos_embed(order)
        for block in self.blocks:
            tokens = block(tokens)
        return SimpleNamespace(sup=self.head(self.norm(tokens)[:, 0]))

    def localisation_loss(self, masked: Tensor) -> Tensor:
        """Of a mask (N,) bool."""
        places, predicted = self.dlocr(self.pos_embed, (~masked)[None].long())
        return functional.l1_loss(predicted, places)


class FixedPositions(nn.Module):
    """A ViT whose sin-cos positions are a buffer (as SimpleViT's): nothing of them is learnt or sent."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm_vit(pos_embed="none")
        waves = torch.arange(16)[:, None] * torch.logspace(0, -4, 24)
        self.register_buffer("pos_embedding", torch.cat([waves.sin(), waves.cos()], dim=1)[None])
        self.vit.patch_embed.register_forward_hook(lambda module, inputs, output: output + self.pos_embedding)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images)
