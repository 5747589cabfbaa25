"""The last block's attention weights compared with softmax(q k^T / sqrt(d)) computed explicitly in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from attacks import UsageError
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.attention import last_attention

IMAGES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def sharp() -> BuiltModel:
    """A model with random weights, whose last queries and keys are scaled so that its attention is far from uniform."""
    built = build_model("vit_mini_64", num_classes=8, weights="random")
    with torch.no_grad():
        built.module.blocks[-1].attn.qkv.weight[: 2 * 192].mul_(6)
    return built


def by_hand(built: BuiltModel, images: torch.Tensor) -> torch.Tensor:
    module = copy.deepcopy(built.module).double().eval()
    with torch.no_grad():
        tokens = module.patch_embed(built.normalise(images.double()))
        tokens = torch.cat([module.cls_token.expand(len(images), -1, -1), tokens], dim=1) + module.pos_embed
        for block in module.blocks[:-1]:
            tokens = block(tokens)
        last = module.blocks[-1]
        joint = last.norm1(tokens) @ last.attn.qkv.weight.T + last.attn.qkv.bias  # (B, T, 3 D)
        query, key, _ = joint.chunk(3, dim=-1)
        heads, width = last.attn.num_heads, joint.shape[-1] // 3 // last.attn.num_heads
        weights = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(width)
            weights.append(scores.exp() / scores.exp().sum(dim=-1, keepdim=True))
    return torch.stack(weights, dim=1)


def test_equals_an_explicit_softmax(sharp) -> None:
    found, wanted = last_attention(sharp, IMAGES), by_hand(sharp, IMAGES)
    assert found.shape == (3, 3, 65, 65)
    assert wanted.max() > 10 / 65
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)


def test_the_model_is_unchanged_afterwards(sharp) -> None:
    layer = sharp.module.blocks[-1].attn
    with torch.no_grad():
        before = sharp.module.eval()(sharp.normalise(IMAGES))
        last_attention(sharp, IMAGES)
        after = sharp.module(sharp.normalise(IMAGES))
    assert torch.equal(before, after)
    assert layer.fused_attn == sharp.module.blocks[0].attn.fused_attn
    assert not layer.attn_drop._forward_pre_hooks


def test_a_model_without_cls_token_is_refused() -> None:
    with pytest.raises(UsageError, match=r"resnet50 has no \[CLS\] token"):
        last_attention(build_model("resnet50", num_classes=8, weights="random"), torch.rand(1, 3, 224, 224))
