"""LoRA: what the factors' gradients are, what clients send of them, and what leaks over rounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from attacks import ATTACKS, UsageError
from attacks.gradient_matching.unrolled import math_attention
from attacks.linear.completion import VOUCHED_DEVIATION
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense
from fedmjp.federation_options import FederationConfig
from fedmjp.metrics import patch_recovery, psnr
from fedmjp.models import build_model
from fedmjp.models.low_rank import LowRankLinear, merged_state
from fedmjp.models.vit import attend_to_context
from tests.conftest import federated_rounds, observed_update, photographs

QKV = "blocks.0.attn.qkv"


def adapted(model: str = "vit_micro8_32", rank: int = 4, moved: bool = False):
    """A small model with factors, in float64; with B drawn at random where `moved`."""
    built = build_model(model, num_classes=8, weights="random")
    torch.manual_seed(1)
    DEFENSES.get("lora")(lora_rank=rank).adapt(built.module)
    built.module.double().eval()
    for layer in built.module.modules():
        if moved and isinstance(layer, LowRankLinear):
            torch.nn.init.normal_(layer.lora_B, std=0.1)
    return built


def task_of(defense: str, clients: int = 2, model: str = "vit_micro8_32", weights: str = "random") -> ClientTask:
    config = RunConfig(
        defense=(defense,),
        federation=FederationConfig(clients=clients, learning_rate=0.1),
        model=ModelConfig(model, weights),
        data=DataConfig(train_limit=clients, test_limit=2),
    )
    return ClientTask(config, defense)


@pytest.mark.parametrize("moved", [False, True])
def test_gradients_of_the_factors_are_projections_of_the_inputs(moved: bool) -> None:
    """The formulas of `lora_span`, summed token by token, against autograd; dL/dA is zero while B is."""
    built = adapted(moved=moved)
    layer, seen = built.module.get_submodule(QKV), {}
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.update(x=inputs[0], y=output))
    loss = functional.cross_entropy(built.module(photographs(32, 1).double()), torch.tensor([3]))
    handle.remove()
    by_a, by_b, by_y = torch.autograd.grad(loss, [layer.lora_A, layer.lora_B, seen["y"]])
    inputs, outputs = seen["x"][0], by_y[0]
    expected_a, expected_b = torch.zeros_like(by_a), torch.zeros_like(by_b)
    for x, g in zip(inputs, outputs, strict=True):
        expected_b += 16 / 4 * torch.outer(g, layer.lora_A @ x)
        expected_a += 16 / 4 * torch.outer(layer.lora_B.T @ g, x)
    torch.testing.assert_close(by_b, expected_b, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(by_a, expected_a, rtol=1e-9, atol=1e-15)
    assert by_b.any()
    assert bool(by_a.any()) == moved
    outside = by_a - by_a @ torch.linalg.pinv(inputs) @ inputs
    assert float(outside.detach().norm()) <= 1e-10 * float(by_a.detach().norm())
    assert torch.linalg.matrix_rank(by_a.detach()) == (4 if moved else 0)


def test_the_same_as_the_package_peft() -> None:
    peft = pytest.importorskip("peft")
    ours = adapted(moved=True).module
    theirs = build_model("vit_micro8_32", num_classes=8, weights="random").module.double().eval()
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["qkv"]), theirs)
    with torch.no_grad():
        for name, layer in ours.named_modules():
            if isinstance(layer, LowRankLinear):
                other = theirs.get_submodule(name)
                other.lora_A["default"].weight.copy_(layer.lora_A)
                other.lora_B["default"].weight.copy_(layer.lora_B)
    images = photographs(32, 2).double()
    torch.testing.assert_close(ours(images), theirs(images))


def test_factors_change_nothing_at_first_and_merge_into_the_weights() -> None:
    images = photographs(32, 2).double()
    plain = build_model("vit_micro8_32", num_classes=8, weights="random").module.double().eval()
    torch.testing.assert_close(adapted().module(images), plain(images), rtol=0, atol=0)
    moved = adapted(moved=True).module
    assert not torch.allclose(moved(images), plain(images))
    plain.load_state_dict(merged_state(moved))
    torch.testing.assert_close(moved(images), plain(images))


def test_attention_to_a_context_uses_the_factors() -> None:
    """MP3's blocks read the layer's matrix themselves: with all tokens as context they are timm's."""
    module = adapted(moved=True).module
    tokens = torch.randn(1, 17, module.embed_dim, dtype=torch.float64)
    with math_attention():
        found = attend_to_context(module.blocks[0], tokens, torch.arange(17)[None])
        torch.testing.assert_close(found, module.blocks[0](tokens))


def test_a_client_sends_factors_and_head() -> None:
    task = task_of("lora:lora_rank=2,lora_targets=blocks.0.*.qkv,blocks.1.mlp.fc1")
    _, sent, (received, *_) = next(federated_rounds(task, 1))
    view = observed_update(task, sent, received, 1)
    layers = (QKV, "blocks.1.mlp.fc1")
    factors = {f"{layer}.{factor}" for layer in layers for factor in ("lora_A", "lora_B")}
    assert set(view.gradients) == factors | {"head.weight", "head.bias"}
    assert view.gradients[f"{QKV}.lora_A"].shape == (2, task.model.module.embed_dim)
    assert not view.gradients[f"{QKV}.lora_A"].any()
    assert view.gradients[f"{QKV}.lora_B"].any()
    found = ATTACKS.get("lora_span")()([view])
    assert "first update holds nothing" in found.diagnosis


def test_rounds_of_one_photograph_recover_it() -> None:
    """Trained weights, four clients of one photograph each, rank 8, 65 tokens: from ten updates on."""
    task = task_of("lora", clients=4, model="vit_mini_32", weights="auto")
    image = task.batch(0, 1, 0).images
    views = [observed_update(task, sent, r[0], number) for number, sent, r in federated_rounds(task, 12)]
    early, late = (ATTACKS.get("lora_span")()(views[:count]) for count in (9, 12))
    assert "8 updates of rank 8 show at most 64 directions of the 65 tokens" in early.diagnosis
    assert float(psnr(late.images, image)) > 25
    assert late.details["updates"] == 11
    assert 8 < late.details["directions"] <= 65
    assert not late.known.any()
    assert "directions that the updates show of the 65 tokens" in late.diagnosis
    kept = {n: g for n, g in views[-1].gradients.items() if not n.startswith("head.")}
    blind = ATTACKS.get("lora_span")()([*views[:-1], dataclasses.replace(views[-1], gradients=kept, labels=None)])
    assert "could not be checked: grant labels, or send the classifier's gradient" in blind.diagnosis
    assert not blind.known.any()


@pytest.mark.parametrize(("rank", "rounds", "client", "complete"), [(16, 10, 3, False), (32, 8, 3, True)])
def test_answers_of_incomplete_spans_are_not_vouched_for(rank: int, rounds: int, client: int, complete: bool) -> None:
    """Trained weights; where directions are missing, patches are wrong whose expected error is small."""
    task = task_of(f"lora:lora_rank={rank}", clients=4, model="vit_mini_32", weights="auto")
    views = [observed_update(task, sent, r[client], number) for number, sent, r in federated_rounds(task, rounds)]
    found = ATTACKS.get("lora_span")()(views)
    right = patch_recovery(found.images, task.batch(client, 1, 0).images, patch_size=4)
    assert (found.details["directions"] > 60) == complete
    assert found.details["deviation"] < VOUCHED_DEVIATION
    assert (float(right) == 1) == complete
    assert bool(found.known.any()) == bool(found.known.all()) == complete


def test_updates_of_two_images_are_not_vouched_for() -> None:
    task = task_of("lora", clients=4, model="vit_mini_32", weights="auto")
    views = []
    for number, sent, received in federated_rounds(task, 10):
        views += [observed_update(task, sent, received[client], number) for client in (0, 1)]
    found = ATTACKS.get("lora_span")()(views)
    assert "of several images" in found.diagnosis
    assert not found.known.any()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("lora:lora_rank=0", "--lora-rank must be at least 1, not 0"),
        ("lora:lora_rank=4000", "--lora-rank 4000 is above the rank of a layer"),
        ("lora:lora_alpha=0", "--lora-alpha must be positive"),
        ("lora:lora_targets=", "--lora-targets takes at least one"),
        ("lora:lora_targets=*.query", "--lora-targets *.query: no linear layer of the model has this name"),
    ],
)
def test_bad_options_are_one_line(entry: str, words: str) -> None:
    def start() -> None:
        read_defense(entry).validate()
        task_of(entry)

    with pytest.raises(UsageError) as caught:
        start()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
