"""PRECODE against its formulas: the sample, the divergence, the loss; and what closed forms make of it."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from attacks import ATTACKS, UsageError
from fedmjp.audit.observe import SentModels
from fedmjp.client import ClientTask
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from fedmjp.models.bottleneck import VariationalBottleneck
from fedmjp.train import main as train
from tests.defenses.clients import task_under, update_under, weights_of


def test_the_bottleneck_samples_by_reparameterisation_in_training() -> None:
    torch.manual_seed(0)
    layer, features = VariationalBottleneck(6, 4), torch.randn(3, 6)
    statistics = features @ layer.encode.weight.T + layer.encode.bias
    mean, deviation = statistics[:, :4], F.softplus(statistics[:, 4:])
    torch.manual_seed(5)
    found = layer(features)
    torch.manual_seed(5)
    sample = mean + deviation * torch.randn(3, 4)
    torch.testing.assert_close(found, sample @ layer.decode.weight.T + layer.decode.bias)
    nats = kl_divergence(Normal(mean, deviation), Normal(0.0, 1.0)).sum(dim=1).mean()
    torch.testing.assert_close(layer.take_divergence(), nats / torch.log(torch.tensor(2.0)))
    with pytest.raises(RuntimeError, match="there was none"):
        layer.take_divergence()
    torch.testing.assert_close(layer.eval()(features), mean @ layer.decode.weight.T + layer.decode.bias)
    layer.train()(features)
    copy.deepcopy(layer)  # a graph is not copied along


def test_a_client_sends_the_gradient_of_the_papers_loss() -> None:
    """Cross-entropy of the decoded sample plus 0.001 times the divergence, with the step's own noise."""
    task = task_under("precode:bottleneck_size=16", "vit_micro8_32")
    weights = weights_of(task)
    update = task.update(0, 1, weights)
    module, batch = task.model.module.eval(), task.batch(0, 1, 0)
    tokens = module.forward_features(task.model.normalise(batch.images))
    mean, deviation = module.bottleneck.encode(tokens[:, 0]).chunk(2, dim=1)
    deviation = F.softplus(deviation)
    task.entropy.seed_globally(7, 0, 1, 0)
    logits = F.linear(module.bottleneck.decode(mean + deviation * torch.randn(1, 16)), *module.head.parameters())
    divergence = kl_divergence(Normal(mean, deviation), Normal(0.0, 1.0)).sum() / torch.log(torch.tensor(2.0))
    loss = F.cross_entropy(logits, batch.labels) + 1e-3 * divergence
    assert update.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    names, parameters = zip(*module.named_parameters(), strict=True)
    for name, expected in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(update.tensors[name], expected, rtol=1e-3, atol=1e-5)


def test_noise_is_the_clients_own_and_repeats() -> None:
    task, same = (task_under("precode", "vit_micro8_32") for _ in range(2))
    weights = weights_of(task)
    first, again, later = (t.update(0, r, weights).loss for t, r in ((task, 1), (same, 1), (task, 2)))
    assert first == again
    assert first != later
    assert task.evaluate(weights) == task.evaluate(weights)


def test_trained_weights_load_and_the_bottleneck_is_new_and_shared() -> None:
    plain = build_model("vit_mini_64", num_classes=8).module.state_dict()
    server, client = (task_under("precode") for _ in range(2))
    own = server.model.module.state_dict()
    assert all(torch.equal(own[name], plain[name]) for name in plain if not name.startswith("head."))
    assert {name for name in own if name not in plain} == {
        f"bottleneck.{layer}.{kind}" for layer in ("encode", "decode") for kind in ("weight", "bias")
    }
    assert all(torch.equal(tensor, client.parameters[name]) for name, tensor in server.parameters.items())
    sent = SentModels(server.model.module)(weights_of(server))
    images = server.batch(0, 1, 0).images
    assert torch.equal(sent(images), copy.deepcopy(client.model.module).eval()(images))


def test_training_under_it_ends_with_weights_that_it_loads(tmp_path) -> None:
    """From its command line; the bottleneck of a run that starts from them is theirs."""
    small = "--model vit_micro16_32 --data photos --train-limit 8 --test-limit 4 --threads 1 --precision float32"
    recipe = "--epochs 1 --batch-size 4 --repeats 1 --warmup-epochs 0 --defense precode"
    assert train([*small.split(), *recipe.split(), "--out", str(tmp_path)]) == 0
    file = tmp_path / "model.safetensors"
    task = task_under("precode", "vit_micro16_32", weights=str(file))
    weight = task.model.module.bottleneck.encode.weight
    assert torch.equal(weight, load_file(file)["bottleneck.encode.weight"].float())
    with pytest.raises(UsageError, match="unknown"):
        task_under("none", "vit_micro16_32", weights=str(file))


@pytest.mark.parametrize("attack", ["patch_embedding", "token_span"])
def test_attacks_that_leave_bottleneck_and_classifier_out_recover_the_photograph(attack: str) -> None:
    update = update_under("precode")
    found = update.attacked(attack)
    assert float(psnr(found.images, update.original)) > 60
    assert found.certified
    assert "classifier_left_out" in found.flags


def test_matching_leaves_out_what_is_random() -> None:
    """At the photograph itself the stochastic layers' gradients disagree most."""
    view = update_under("precode", "vit_micro8_32").view
    start = {"init": "patch_embedding", "steps": 1}
    every, others = (
        ATTACKS.get("idlg")(**start, leave_out=names)([view]).details["start_loss"]
        for names in ("", "bottleneck.+head.")
    )
    assert others < 0.9 * every


def test_it_acts_in_chains() -> None:
    """With Soteria, the classifier's gradient is that of the decoded sample's kept entries."""
    chained, alone = (task_under(entry, "vit_micro8_32") for entry in ("precode+soteria", "precode"))
    weights = weights_of(alone)
    sent, expected = (task.update(0, 1, weights).tensors for task in (chained, alone))
    changed = [name for name in expected if not torch.allclose(sent[name], expected[name], atol=1e-7)]
    assert changed == ["head.weight"]
    kept = sent["head.weight"].abs().sum(dim=0) > 1e-7
    assert int(kept.sum()) == 64 - round(0.8 * 64)
    torch.testing.assert_close(sent["head.weight"][:, kept], expected["head.weight"][:, kept])


BAD = [
    ("precode:bottleneck_size=0", "vit_micro8_32", "--bottleneck-size must be at least 1, not 0"),
    ("precode:divergence_weight=-1", "vit_micro8_32", "--divergence-weight must not be negative, but is -1.0"),
]


@pytest.mark.parametrize(("entry", "model", "words"), BAD)
def test_what_it_refuses(entry: str, model: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        task_under(entry, model)


def test_it_needs_a_classifier() -> None:
    module = build_model("vit_micro16_32", num_classes=8, weights="random").module
    module.reset_classifier(0)
    with pytest.raises(UsageError, match="precode acts in front of a linear classifier, and this model has none"):
        DEFENSES.get("precode")().adapt(module)


def test_convolutional_networks_have_one_too() -> None:
    task: ClientTask = task_under("precode", "resnet_micro_32", 2)
    sent = task.update(0, 1, weights_of(task)).tensors
    assert sent["bottleneck.encode.weight"].any()
