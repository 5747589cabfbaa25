"""Small Vision Transformers of several libraries and layouts, for 32 x 32 pixels."""

from __future__ import annotations

from types import SimpleNamespace

import timm
import torch
from torch import Tensor, nn

CLASSES = 8


def timm_vit(**options: object) -> nn.Module:
    """timm's ViT with 64 patches."""
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 2, "num_heads": 3}
    return timm.models.VisionTransformer(**(shape | {"num_classes": CLASSES} | options))


def torchvision_vit() -> nn.Module:
    """torchvision's ViT as it comes: its classifier starts at zero."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 4, 2, 3, 192, 384, num_classes=CLASSES)


def hugging_face_vit() -> nn.Module:
    """Hugging Face's ViT with a new classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 384}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=CLASSES, **shape))


class ReleasedLayout(nn.Module):
    """The layout of MJP's released code: one table of N + 2 rows for class token, patches and masked patches."""

    def __init__(self) -> None:
        super().__init__()
        vit = timm_vit(pos_embed="none")
        self.patch_embed, self.cls_token, self.blocks = vit.patch_embed, vit.cls_token, vit.blocks
        self.norm, self.head = vit.norm, vit.head
        self.pos_embed, self.unk_embed_index = nn.Embedding(66, 192), 65

    def forward(self, images: Tensor, unk_mask: Tensor | None = None) -> SimpleNamespace:
        """(B, 3, 32, 32) and a mask (B, 65) of 0 and 1 -> logits as the attribute `sup`."""
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), self.patch_embed(images)], dim=1)
        order = torch.arange(65, device=images.device)[None]
        if unk_mask is not None:
            order = order * (1 - unk_mask) + unk_mask * self.unk_embed_index
        return SimpleNamespace(sup=self.head(self.norm(self.blocks(tokens + self.pos_embed(order)))[:, 0]))


class FixedPositions(nn.Module):
    """A ViT whose sine and cosine positions are a buffer: nothing of them is trained or sent."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm_vit(pos_embed="none")
        waves = torch.arange(64)[:, None] * torch.logspace(0, -4, 96)
        self.register_buffer("pos_embedding", torch.cat([waves.sin(), waves.cos()], dim=1)[None])
        self.vit.patch_embed.register_forward_hook(lambda module, inputs, output: output + self.pos_embedding)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> logits (B, classes)."""
        return self.vit(images)
