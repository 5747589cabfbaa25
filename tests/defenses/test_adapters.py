"""Adapters: what they compute, what their gradients are, and what clients send of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from attacks import ATTACKS, UsageError
from attacks.gradient_matching.matched_update import extract_matched_update
from attacks.gradient_matching.simulation import build_simulation
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import read_defense
from fedmjp.federation_options import FederationConfig
from fedmjp.models import build_model
from tests.conftest import federated_rounds, observed_update, photographs


def adapted(moved: bool):
    """A small model with adapters of 4 units, in float64; drawn at random where `moved`."""
    built = build_model("vit_micro8_32", num_classes=8, weights="random")
    torch.manual_seed(1)
    DEFENSES.get("adapters")(adapter_size=4).adapt(built.module)
    built.module.double().eval()
    for block in built.module.blocks if moved else ():
        torch.nn.init.normal_(block.mlp.adapter.up.weight, std=0.1)
    return built.module


def task_of(defense: str, model: str = "vit_micro8_32") -> ClientTask:
    config = RunConfig(
        defense=(defense,),
        federation=FederationConfig(clients=2, learning_rate=0.1),
        model=ModelConfig(model, "random"),
        data=DataConfig(train_limit=2, test_limit=2),
    )
    return ClientTask(config, defense)


def test_a_block_with_its_adapter_against_its_formula() -> None:
    """z = h + U gelu(V h + v) + u, token by token, in a copy of the model, too; nothing changes at the start."""
    images = photographs(32, 1).double()
    plain = build_model("vit_micro8_32", num_classes=8, weights="random").module.double().eval()
    torch.testing.assert_close(adapted(moved=False)(images), plain(images), rtol=0, atol=0)
    module = copy.deepcopy(adapted(moved=True))
    assert not torch.allclose(module(images), plain(images))
    block, tokens = module.blocks[0], torch.randn(1, 5, module.embed_dim, dtype=torch.float64)
    layer, found = block.mlp.adapter, block.mlp(tokens)
    before = block.mlp.fc2(functional.gelu(block.mlp.fc1(tokens)))
    for h, z in zip(before[0], found[0], strict=True):
        hidden = functional.gelu(layer.down.weight @ h + layer.down.bias)
        torch.testing.assert_close(z, h + layer.up.weight @ hidden + layer.up.bias)


def test_gradients_lie_in_the_span_of_what_adapters_read() -> None:
    module, seen = adapted(moved=True), {}
    layer = module.blocks[0].mlp.adapter
    handle = layer.down.register_forward_hook(lambda _, inputs, output: seen.update(h=inputs[0], y=output))
    loss = functional.cross_entropy(module(photographs(32, 1).double()), torch.tensor([3]))
    handle.remove()
    by_down, by_y = torch.autograd.grad(loss, [layer.down.weight, seen["y"]])
    expected = sum(torch.outer(d, h) for d, h in zip(by_y[0], seen["h"][0], strict=True))
    torch.testing.assert_close(by_down, expected, rtol=1e-9, atol=1e-15)


def test_a_client_sends_adapters_and_head_and_searches_match_them() -> None:
    task = task_of("adapters")
    number, sent, (received, *_) = list(federated_rounds(task, 2))[-1]
    view = observed_update(task, sent, received, number)
    assert set(view.gradients) == {n for n in task.parameters if ".adapter." in n} | {"head.weight", "head.bias"}
    batch = task.batch(0, number, 0)
    simulation, target = build_simulation(view, [extract_matched_update(view)], 1, exact=True)
    simulated = simulation.gradients(task.model.normalise(batch.images)[None], batch.labels[None])
    assert set(target.values) == set(view.gradients)
    for name, gradient in target.values.items():
        torch.testing.assert_close(simulated[name], gradient, rtol=1e-3, atol=1e-6)
    assert "no gradient of" in ATTACKS.get("patch_embedding")()([view]).diagnosis


@pytest.mark.parametrize(
    ("entry", "model", "words"),
    [
        ("adapters:adapter_size=0", "vit_micro8_32", "--adapter-size must be at least 1, not 0"),
        ("adapters:adapter_size=500", "vit_micro8_32", "--adapter-size 500 is no bottleneck"),
        ("adapters", "resnet_micro_32", "--defense adapters needs a ViT"),
    ],
)
def test_bad_options_are_one_line(entry: str, model: str, words: str) -> None:
    def start() -> None:
        read_defense(entry).validate()
        task_of(entry, model)

    with pytest.raises(UsageError) as caught:
        start()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
