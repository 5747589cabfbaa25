"""Tokenizers of timm, torchvision and Hugging Face ViTs are found, and what does not fit is refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from attacks import UsageError, check_tokenizer, find_tokenizer


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 48, 96, num_classes=5)


def hugging_face_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def timm_vit(**options) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=5, **options
    )


FOUND = [
    (timm_vit, 1),
    (lambda: timm_vit(class_token=False, global_pool="avg"), 0),
    (lambda: timm_vit(reg_tokens=4), 5),
    (lambda: timm_vit(no_embed_class=True), 0),
    (torchvision_vit, 1),
    (hugging_face_vit, 1),
]


@pytest.mark.parametrize(("make", "prefix"), FOUND)
def test_found_and_proved(make, prefix: int) -> None:
    torch.manual_seed(0)
    model = make()
    nn.init.normal_([p for n, p in model.named_parameters() if n.endswith("weight") and p.dim() == 2][-1])
    tokenizer = find_tokenizer(model, (3, 32, 32))
    assert (tokenizer.prefix, tokenizer.grid, tokenizer.width, tokenizer.patch_dim) == (prefix, (4, 4), 48, 192)
    assert check_tokenizer(model, tokenizer, (3, 32, 32)) < 1e-4


def test_patchify_is_the_projection_and_inverts() -> None:
    model = timm_vit()
    tokenizer = find_tokenizer(model, (3, 32, 32))
    images = torch.rand(2, 3, 32, 32)
    patches = tokenizer.patchify(images)
    conv = model.patch_embed.proj
    by_hand = patches @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(by_hand, model.patch_embed(images))
    assert torch.equal(tokenizer.unpatchify(patches), images)


class NormBetween(nn.Module):
    """A norm between projection and position embedding: the names fit, the identity does not."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = timm_vit()
        self.vit.patch_embed.norm = nn.LayerNorm(48)

    def forward(self, images):
        return self.vit(images)


REFUSED = [
    (lambda: timm.create_model("resnet18"), "no patch projection"),
    (lambda: timm_vit(pos_embed="none"), "no learnable position embedding"),
    (NormBetween, "not projection [+] position"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_refused_with_a_reason(make, words: str) -> None:
    torch.manual_seed(0)
    model = make()
    with pytest.raises(UsageError, match=words):
        check_tokenizer(model, find_tokenizer(model, (3, 32, 32)), (3, 32, 32))


def test_image_that_does_not_divide() -> None:
    with pytest.raises(UsageError, match="do not divide"):
        find_tokenizer(timm_vit(), (3, 30, 30))
