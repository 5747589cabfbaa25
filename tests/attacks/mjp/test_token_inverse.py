"""The image without the patch projection's gradient: tokens against the client's own, and what stands in the way."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS, find_tokenizer
from attacks.certificate import certify
from attacks.mjp.mlp_spans import read_first_block
from attacks.mjp.token_duals import normalised
from attacks.mjp.token_inverse import first_tokens
from fedmjp.metrics import patch_recovery, score
from fedmjp.models import BuiltModel, build_model
from tests.attacks.mjp.test_unmix import without
from tests.conftest import observe, photographs

PROJECTION = ("patch_embed.proj.weight", "patch_embed.proj.bias")


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_64", num_classes=200, weights="auto")


@pytest.mark.parametrize("positions", [(), ("pos_embed",)])
def test_a_photograph_comes_back(trained, positions: tuple[str, ...]) -> None:
    image = photographs(64, 2)[1:]
    view = without(observe(trained, image), *PROJECTION, *positions)
    attack = ATTACKS.get("token_inverse")()
    assert attack.obstacle([view]) == ""
    found = attack([view])
    assert found.diagnosis == ""
    assert float(score(found.images, image, patch_size=8)["psnr"][0]) > 40
    assert float(patch_recovery(found.images, image, 8)[0]) == 1.0
    assert not found.known.any()  # places and means are the smoothest ones
    assert certify(view, found)[0]


def test_tokens_are_those_that_the_client_fed() -> None:
    """In float64, from the tokens at the second norm, both read off the client's own forward pass."""
    built = build_model("vit_mini_64", num_classes=8, weights="random")
    built.module.double()
    image = photographs(64, 1).double()
    view, seen = observe(built, image), {}
    block = read_first_block(view, find_tokenizer(view.model, view.image_shape))
    module = built.module.blocks[0]
    hooks = [
        layer.register_forward_pre_hook(lambda _, x, n=name: seen.__setitem__(n, x[0][0]))
        for name, layer in (("first", module.norm1), ("second", module.norm2))
    ]
    with torch.no_grad():
        built.module(built.normalise(image))
    for hook in hooks:
        hook.remove()
    centred, residual = first_tokens(without(view, *PROJECTION), block, normalised(seen["second"]))
    true = seen["first"] - seen["first"].mean(dim=1, keepdim=True)
    assert float(residual.max()) < 1e-6
    assert float((centred - true).norm() / true.norm()) < 1e-5


@pytest.mark.parametrize(
    ("name", "withheld", "words"),
    [
        ("vit_mini_64", (), "the update holds the patch projection's gradient"),
        ("vit_mini_32", PROJECTION, "token_span solves them"),
        ("vit_mini_64_mjp", PROJECTION, "positions of this model may be masked"),
        ("vit_mini_64_nope", PROJECTION, "nothing tells a patch's place"),
        ("vit_mini_64", (*PROJECTION, "blocks.0.mlp.fc1.weight"), "no gradient of blocks.0.mlp.fc1.weight"),
        ("vit_mini_64", (*PROJECTION, "blocks.0.attn.qkv.weight"), "no gradient of blocks.0.attn.qkv.weight"),
    ],
)
def test_what_stands_in_the_way(name: str, withheld: tuple[str, ...], words: str) -> None:
    model = build_model(name, num_classes=5, weights="random")
    view = without(observe(model, photographs(model.image_size, 1)), *withheld)
    attack = ATTACKS.get("token_inverse")()
    assert words in attack.obstacle([view])
    found = attack([view])
    assert found.images is None
    assert words in found.diagnosis


def test_large_patches_and_many_tokens_are_refused() -> None:
    model = build_model("vit_ti", num_classes=5, weights="random")
    view = without(observe(model, photographs(224, 1)), *PROJECTION)
    reason = ATTACKS.get("token_inverse")().obstacle([view])
    assert "a patch has 768 values and a token 192 channels" in reason
    assert "197 tokens in 192 channels" in reason
