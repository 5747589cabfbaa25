"""Models whose first block is named as attacks expect it and computes something else are refused, with the reason."""

from __future__ import annotations

import pytest
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import nn

from attacks import ATTACKS, UsageError, find_tokenizer
from attacks.closed_form.token_equations import check_block
from attacks.layer_inputs import layer_inputs
from attacks.memory import remember
from attacks.mjp.mlp_spans import read_first_block
from fedmjp.models import BuiltModel
from tests.conftest import observe, photographs

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 5}


def built(module: nn.Module) -> BuiltModel:
    """With parameters that start at zero or one moved off them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2 or not parameter.any():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return BuiltModel(module.eval(), "other", "standard", 32, 8, (0.5,) * 3, (0.25,) * 3, "random")


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(**SIZES, **options)


def beit(**options) -> nn.Module:
    torch.manual_seed(0)
    return Beit(**SIZES, use_abs_pos_emb=True, **options)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: vit(pre_norm=True), "second norm does not receive projection"),
        (lambda: vit(block_fn=ResPostBlock), "second norm does not receive projection"),
        (lambda: beit(init_values=0.1), "a layer scale under another name"),
        (lambda: beit(use_rel_pos_bias=True, init_values=None), "not the softmax of its queries and keys alone"),
    ],
)
def test_other_first_blocks_are_not_read(module, reason: str) -> None:
    model = built(module())
    view = observe(model, photographs(32, 1))
    with pytest.raises(UsageError, match=reason):
        read_first_block(view, find_tokenizer(view.model, view.image_shape))


@pytest.mark.parametrize("options", [{"pre_norm": True}, {"block_fn": ResPostBlock}])
def test_token_span_names_the_construction_and_no_defence(options: dict) -> None:
    view = observe(built(vit(**options)), photographs(32, 1))
    view.gradients.pop("pos_embed")
    attack = ATTACKS.get("token_span")()
    for words in (attack.obstacle([view]), attack([view]).diagnosis):
        assert "its first attention does not receive layer norm (projection + position)" in words
        assert "defence" not in words


@pytest.mark.parametrize("options", [{}, {"init_values": 0.1, "qk_norm": True}, {"class_token": False}])
def test_pre_norm_blocks_are_read_and_left_as_they_were(options: dict) -> None:
    module = vit(**options, **({} if options.get("class_token", True) else {"global_pool": "avg"}))
    view = observe(built(module), photographs(32, 1))
    module.train()
    read_first_block(view, find_tokenizer(view.model, view.image_shape))
    check_block(view)
    assert all(part.training for part in module.modules())
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_what_cannot_be_run_is_taken_at_its_names() -> None:
    view = observe(built(vit()), photographs(32, 1))
    view.gradients.pop("pos_embed")
    kept = remember(view).model
    assert layer_inputs(kept, ["blocks.0.norm2"], torch.zeros(1, 3, 32, 32)) == {}
    check_block(remember(view))
