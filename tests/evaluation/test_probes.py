"""k-nearest neighbours and the linear probe against slow computations of the same, and on features that are known."""

from __future__ import annotations

import math

import pytest
import torch

from attacks import UsageError
from fedmjp.config import ModelConfig
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES
from fedmjp.evaluation.features import features
from fedmjp.evaluation.linear_probe import fit_logistic, probe_accuracy
from fedmjp.evaluation.neighbours import neighbour_accuracy, neighbour_votes
from fedmjp.models import build_model
from fedmjp.objectives import Learner, read_objective

CPU = torch.device("cpu")


def test_votes_against_a_loop() -> None:
    torch.manual_seed(0)
    train, test, labels = torch.randn(30, 5).double(), torch.randn(7, 5).double(), torch.randint(0, 3, (30,))
    found = neighbour_votes(train, labels, test, k=4, classes=3)
    for row, votes in zip(test.tolist(), found.tolist(), strict=True):
        cosines = []
        for other, label in zip(train.tolist(), labels.tolist(), strict=True):
            product = sum(a * b for a, b in zip(row, other, strict=True))
            cosines.append((product / math.sqrt(sum(a * a for a in row) * sum(b * b for b in other)), label))
        expected = [0.0] * 3
        for cosine, label in sorted(cosines, reverse=True)[:4]:
            expected[label] += math.exp(cosine / 0.07)
        assert votes == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("k", [0, 31])
def test_neighbours_out_of_range(k: int) -> None:
    with pytest.raises(UsageError, match="k-NN takes 1 to 30 neighbours"):
        neighbour_votes(torch.randn(30, 5), torch.zeros(30, dtype=torch.long), torch.randn(7, 5), k, 3)


def test_logistic_regression_is_at_the_minimum() -> None:
    """The gradient of the penalised loss, written out, is zero there."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 4).double(), torch.randint(0, 3, (60,))
    weight, bias = fit_logistic(inputs, labels, 3, decay=0.01, steps=500)
    surplus = (inputs @ weight.T + bias).softmax(dim=1) - torch.nn.functional.one_hot(labels, 3)
    torch.testing.assert_close(surplus.T @ inputs / 60 + 0.01 * weight, torch.zeros(3, 4).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(surplus.mean(dim=0), torch.zeros(3).double(), atol=1e-6, rtol=0)


def test_features_are_what_the_classifier_reads() -> None:
    model, data = build_model("vit_micro_32", num_classes=8, weights="random"), load_data("photos", size=32)
    found = features(model, data.test, CPU)
    logits = model.module(model.normalise(data.test.images(range(len(data.test)))))
    torch.testing.assert_close(model.module.head(found), logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, features(model, data.test, CPU, "mean"))


def test_features_of_several_blocks_are_those_of_timm() -> None:
    """DINO's linear probe reads the class tokens of the last blocks; timm has a function for its own models."""
    model, data = build_model("vit_micro_32", num_classes=8, weights="random"), load_data("photos", size=32)
    pixels = model.normalise(data.test.images(range(len(data.test))))
    peer = model.module.get_intermediate_layers(pixels, n=2, return_prefix_tokens=True, norm=True)
    found = features(model, data.test, CPU, blocks=2)
    torch.testing.assert_close(found, torch.cat([prefix[:, 0] for _, prefix in peer], dim=1), atol=1e-5, rtol=1e-4)
    averaged = features(model, data.test, CPU, "mean", blocks=2)
    torch.testing.assert_close(averaged, torch.cat([own.mean(dim=1) for own, _ in peer], dim=1), atol=1e-5, rtol=1e-4)
    assert features(model, data.test, CPU, blocks=4).shape == (len(data.test), 3 * 64)  # it has three blocks


def test_a_trained_encoder_beats_chance_and_itself_untrained() -> None:
    data = load_data("photos", size=32, train_limit=400, test_limit=100)
    model = build_model("vit_mini_32", num_classes=10, weights="auto")
    assert model.provenance.startswith("shipped")
    near = neighbour_accuracy(model, data, CPU, ks=(1, 10))
    probed = probe_accuracy(model, data, CPU)
    chance = max(torch.bincount(data.test.labels).tolist()) / len(data.test)
    assert near[1] > chance
    assert probed > chance


def test_models_without_features() -> None:
    data = load_data("photos", size=32, test_limit=4)
    mp3 = Learner.build(
        read_objective("mp3"),
        DEFENSES.get("none")(),
        ModelConfig("vit_micro_32", "random"),
        num_classes=8,
        seed=0,
        device=CPU,
    )
    with pytest.raises(UsageError, match="has no class token; read the mean"):
        features(mp3.model, data.test, CPU)
    assert features(mp3.model, data.test, CPU, "mean").shape == (len(data.test), 64)
    with pytest.raises(UsageError, match="features are read from plain ViTs"):
        features(build_model("resnet_micro_32", num_classes=8, weights="random"), data.test, CPU)
