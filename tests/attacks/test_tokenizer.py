"""Tokenizers of timm, torchvision and Hugging Face ViTs are found, and what does not fit is refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from attacks import UsageError, check_tokenizer, find_tokenizer
from attacks.closed_form.token_equations import prefix_tokens
from tests.attacks.models import (
    FixedPositions,
    ReleasedMJP,
    hugging_face_deit,
    hugging_face_vit,
    timm_vit,
    torchvision_vit,
)

FOUND = [
    (timm_vit, 1),
    (lambda: timm_vit(class_token=False, global_pool="avg"), 0),
    (lambda: timm_vit(reg_tokens=4), 5),
    (lambda: timm_vit(no_embed_class=True), 0),
    (torchvision_vit, 1),
    (hugging_face_vit, 1),
    (hugging_face_deit, 2),
    (lambda: ReleasedMJP(width=48), 1),
]


@pytest.mark.parametrize(("make", "prefix"), FOUND)
def test_found_and_proved(make, prefix: int) -> None:
    torch.manual_seed(0)
    model = make()
    tokenizer = find_tokenizer(model, (3, 32, 32))
    assert (tokenizer.prefix, tokenizer.grid, tokenizer.width, tokenizer.patch_dim) == (prefix, (4, 4), 48, 192)
    assert check_tokenizer(model, tokenizer, (3, 32, 32)) < 1e-4


class Wrapped(nn.Module):
    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images):
        return self.vit(images)


@pytest.mark.parametrize("wrap", [lambda vit: vit, Wrapped])
def test_tokens_without_a_position_are_counted(wrap) -> None:
    """Class and register tokens that the table of positions leaves out, in a model of one's own as well."""
    model = wrap(timm_vit(reg_tokens=4, no_embed_class=True))
    tokenizer = find_tokenizer(model, (3, 32, 32))
    assert (tokenizer.prefix, tokenizer.prefix_rows, prefix_tokens(tokenizer)) == (0, 5, 5)
    assert [name.rpartition(".")[2] for name in tokenizer.prefix_tokens] == ["cls_token", "reg_token"]


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
    (FixedPositions, "no learnable position embedding"),
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


def test_image_that_the_model_cannot_take() -> None:
    model = timm_vit()
    with pytest.raises(UsageError, match=r"cannot be run on images of shape \(3, 16, 64\)"):
        check_tokenizer(model, find_tokenizer(model, (3, 16, 64)), (3, 16, 64))


def test_frozen_parts_are_checked_and_stay_frozen() -> None:
    model = timm_vit()
    model.patch_embed.requires_grad_(False)
    assert check_tokenizer(model, find_tokenizer(model, (3, 32, 32)), (3, 32, 32)) < 1e-4
    assert not model.patch_embed.proj.weight.requires_grad


def test_the_released_table_is_split_into_positions_and_shared_embedding() -> None:
    model = ReleasedMJP()
    tokenizer, table = find_tokenizer(model, (3, 32, 32)), model.pos_embed.weight
    parameters = dict(model.named_parameters())
    assert torch.equal(tokenizer.position_rows(parameters), table[:17])
    assert torch.equal(tokenizer.shared_embedding(parameters), table[17])
    replaced = tokenizer.replace_patch_rows(table.detach(), torch.zeros(16, 96))
    assert torch.equal(replaced[[0, 17]], table[[0, 17]])
    assert not replaced[1:17].any()
    mask = torch.arange(16)[None] > 10
    kwargs = tokenizer.mask_kwargs(mask)
    torch.testing.assert_close(kwargs["unk_mask"][:, 1:].bool(), mask)
    assert kwargs["unk_mask"].shape == (1, 17)
