"""The registry: shapes, variants that share weights, the MJP input layer, checkpoints that fit or do not fit."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file

from attacks import UsageError
from fedmjp.models import build_model, model_names, registry
from fedmjp.models.localisation import DenseAbsoluteLocalisation
from tests.conftest import photographs, shared_file

SMALL = ["vit_mini_32", "vit_mini_64", "vit_mini_64_nope", "vit_mini_64_mjp", "vit_micro_32_idx"]
SMALL += ["swin_micro_32", "resnet_micro_32"]
LARGE = ["vit_s", "deit_s_nope", "deit_s_mjp", "vit_ti", "deit_ti", "swin_t", "resnet50"]
LARGE += [pytest.param(name, marks=pytest.mark.long) for name in ("vit_b", "deit_b_mjp")]


@pytest.mark.parametrize("name", SMALL + LARGE)
def test_forward_and_backward(name: str) -> None:
    model = build_model(name, num_classes=7, weights="random")
    images = photographs(model.image_size, 2)
    logits = model.module(model.normalise(images))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert model.provenance == "random (seed 0), NOT TRAINED"
    assert name in model_names()


def test_plain_vits_equal_timms() -> None:
    import timm

    torch.manual_seed(3)
    theirs = timm.create_model("deit_small_patch16_224", num_classes=7)
    ours = build_model("deit_s", num_classes=7, weights="random", seed=3)
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.module.state_dict()[key]), key
    images = torch.rand(1, 3, 224, 224)
    assert torch.equal(theirs.eval()(images), ours.module.eval()(images))


def test_variants_share_weights() -> None:
    plain, mjp, nope = (
        build_model(f"vit_mini_64{v}", num_classes=7, weights="random").module.state_dict()
        for v in ("", "_mjp", "_nope")
    )
    assert all(torch.equal(plain[k], mjp[k]) for k in plain)
    assert set(mjp) - set(plain) == {"unk_embed", "dal.map.weight", "dal.map.bias"}
    assert set(plain) - set(nope) == {"pos_embed"}


def test_masked_positions_get_the_unknown_embedding() -> None:
    """Equation 6: the unknown embedding is added to tokens of hidden patches, their own embedding to the others."""
    module = build_model("vit_mini_64_mjp", num_classes=7, weights="random").module
    images = torch.randn(2, 3, 64, 64)
    mask = torch.rand(2, 64) < 0.4
    patches = module.patch_embed(images)
    tokens = module._masked_pos_embed(patches, mask)
    for b in range(2):
        torch.testing.assert_close(tokens[b, 0], (module.cls_token + module.pos_embed[:, :1])[0, 0])
        for i in range(64):
            position = module.unk_embed[0, 0] if mask[b, i] else module.pos_embed[0, i + 1]
            torch.testing.assert_close(tokens[b, i + 1], patches[b, i] + position)
    nothing = module(images, torch.zeros(2, 64, dtype=torch.bool))
    torch.testing.assert_close(nothing, module(images))


def test_masked_rows_get_no_gradient() -> None:
    module = build_model("vit_mini_64_mjp", num_classes=7, weights="random").module
    mask = torch.zeros(1, 64, dtype=torch.bool)
    mask[0, 5:25] = True
    module(torch.randn(1, 3, 64, 64), mask)[0, 0].backward()
    zero = module.pos_embed.grad[0, 1:].abs().amax(dim=1) == 0
    assert torch.equal(zero, mask[0])
    assert module.unk_embed.grad.abs().sum() > 0


def test_origins_add_the_row_of_the_original_place() -> None:
    """IDX: token i is its patch's projection plus position i plus the row of the patch's original place."""
    module = build_model("vit_micro_32_idx", num_classes=7, weights="random").module
    images = torch.randn(2, 3, 32, 32)
    origins = torch.stack([torch.randperm(64) for _ in range(2)])
    seen = []
    module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module(images, origins=origins)
    weight, bias = module.patch_embed.proj.weight, module.patch_embed.proj.bias
    for b in range(2):
        torch.testing.assert_close(seen[0][b, 0], (module.cls_token + module.pos_embed[:, :1])[0, 0])
        for i in range(64):
            y, x = divmod(i, 8)
            patch = (weight * images[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]).sum(dim=(1, 2, 3)) + bias
            expected = patch + module.pos_embed[0, i + 1] + module.idx_embed[0, origins[b, i]]
            torch.testing.assert_close(seen[0][b, i + 1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module(images), module(images, origins=torch.arange(64).expand(2, -1)))


def test_rows_of_origins_get_the_gradient_of_their_patch() -> None:
    """Row j of the second table gets the gradient of the position row of the place where patch j is shown."""
    module = build_model("vit_micro_32_idx", num_classes=7, weights="random").module
    origins = torch.randperm(64)[None]
    module(torch.randn(1, 3, 32, 32), origins=origins)[0, 0].backward()
    assert module.pos_embed.grad[0, 1:].abs().amax(dim=1).min() > 0
    torch.testing.assert_close(module.idx_embed.grad[0, origins[0]], module.pos_embed.grad[0, 1:])


def test_origins_without_their_table_raise() -> None:
    module = build_model("vit_micro_32_mjp", num_classes=7, weights="random").module
    with pytest.raises(ValueError, match="_idx variant"):
        module(torch.randn(1, 3, 32, 32), origins=torch.arange(64)[None])


def test_small_backbones_have_no_published_weights() -> None:
    for name in ("swin_micro_32", "resnet_micro_32"):
        with pytest.raises(UsageError, match="timm publishes no weights"):
            build_model(name, num_classes=7, weights="timm")


def test_mask_without_unknown_embedding_raises() -> None:
    module = build_model("vit_mini_64", num_classes=7, weights="random").module
    with pytest.raises(ValueError, match="_mjp variant"):
        module(torch.randn(1, 3, 64, 64), torch.ones(1, 64, dtype=torch.bool))


def test_dal_linear_equals_its_formula() -> None:
    dal = DenseAbsoluteLocalisation(8, "linear")
    positions, mask = torch.randn(6, 8), torch.tensor([[True, False, False, True, False, False]])
    expected = []
    for i in range(6):
        if not mask[0, i]:
            place = torch.tensor([i // 3 + 1.0, i % 3 + 1.0])
            expected.append((place - dal.map(positions[i])).abs().mean())
    torch.testing.assert_close(dal(positions, (2, 3), mask), torch.stack(expected).mean())


@pytest.mark.parametrize("kind", ["pca", "linear", "nonlinear"])
def test_dal_depends_on_visible_positions_only(kind: str) -> None:
    positions = torch.randn(64, 16, requires_grad=True)
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[:, 10:20] = True
    loss = DenseAbsoluteLocalisation(16, kind)(positions, (8, 8), mask)
    loss.backward()
    assert not positions.grad[10:20].any()
    assert positions.grad[:10].any()


def test_dal_fits_its_axes_in_full_precision() -> None:
    torch.manual_seed(0)
    dal, positions = DenseAbsoluteLocalisation(16, "pca"), torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        halved = dal(positions, (8, 8))
    assert torch.equal(halved, dal(positions, (8, 8)))


def test_checkpoint_round_trip(tmp_path) -> None:
    model = build_model("vit_mini_32", num_classes=7, weights="random", seed=5)
    path = tmp_path / "mini.safetensors"
    save_file(model.module.state_dict(), path)
    loaded = build_model("vit_mini_32", num_classes=7, weights=str(path))
    assert all(torch.equal(v, loaded.module.state_dict()[k]) for k, v in model.module.state_dict().items())
    assert loaded.provenance == "mini.safetensors"
    assert "head random" in build_model("vit_mini_32", num_classes=9, weights=str(path)).provenance
    assert "unknown position" in build_model("vit_mini_32_mjp", num_classes=7, weights=str(path)).provenance
    assert build_model("vit_mini_32_nope", num_classes=7, weights=str(path)).provenance == "mini.safetensors"
    with pytest.raises(UsageError, match="does not fit"):
        build_model("vit_mini_64", num_classes=7, weights=str(path))
    with pytest.raises(UsageError, match="does not fit"):
        build_model("resnet50", num_classes=7, weights=str(path))


def test_trained_vit_ti_loads() -> None:
    path = shared_file("weights/vit_tiny_patch16_224.tiny_imagenet.safetensors")
    assert build_model("vit_ti", num_classes=200, weights=str(path)).provenance == path.name


def test_bad_models(tmp_path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no checkpoint")
    cases = [
        ({"name": "deit_x"}, "choose from: vit_ti"),
        ({"name": "resnet50_mjp"}, "unknown model"),
        ({"name": "vit_mini_32", "weights": "nowhere.pt"}, "no checkpoint at nowhere.pt"),
        ({"name": "vit_mini_32", "weights": str(broken)}, "is not a readable checkpoint"),
        ({"name": "vit_mini_32", "weights": "timm"}, "timm publishes no weights"),
        ({"name": "resnet50", "weights": "random", "block": "april"}, "plain ViT"),
    ]
    for options, words in cases:
        with pytest.raises(UsageError, match=words):
            build_model(**({"num_classes": 5} | options))


def test_normalisations_are_timms() -> None:
    """They are written out so that names of models are known without timm."""
    assert registry.IMAGENET_MEAN == timm.data.IMAGENET_DEFAULT_MEAN
    assert registry.IMAGENET_STD == timm.data.IMAGENET_DEFAULT_STD
    assert registry.INCEPTION_MEAN == timm.data.IMAGENET_INCEPTION_MEAN
    assert registry.INCEPTION_STD == timm.data.IMAGENET_INCEPTION_STD


def test_timms_weights_are_taken_over_and_their_positions_resampled(monkeypatch) -> None:
    """As of a download: timm's own model of the name, with the classes of ImageNet."""
    create, asked = timm.create_model, []

    def downloaded(name: str, pretrained: bool = False, **options):
        asked.append((name, pretrained))
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", downloaded)
    torch.manual_seed(5)
    expected = create("vit_tiny_patch16_224").state_dict()
    torch.manual_seed(5)
    built = build_model("vit_ti_mjp", num_classes=200, weights="timm", image_size=160)
    assert asked[-1] == ("vit_tiny_patch16_224", True)
    added = "head random, unknown position random, DAL map random"
    assert built.provenance == f"timm vit_tiny_patch16_224 ({added}), resized to 160 px"
    state = built.module.state_dict()
    for key in ("patch_embed.proj.weight", "blocks.11.mlp.fc2.weight", "norm.bias"):
        assert torch.equal(state[key], expected[key]), key
    assert state["head.weight"].shape == (200, 192)
    grid = expected["pos_embed"][:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2)
    smaller = torch.nn.functional.interpolate(grid, (10, 10), mode="bicubic", antialias=True)
    torch.testing.assert_close(state["pos_embed"][:, 1:], smaller.flatten(2).mT)
