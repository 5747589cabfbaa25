"""Layers of other names, numbers that are none, and a last model that does not fit: each alarms, or is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from attacks.registry import UsageError
from fedmjp.detect import Detector, Received, Report, received_by
from fedmjp.detect.statistics import relative_change
from tests.attacks.models import torchvision_vit
from tests.conftest import photographs

LABELS = torch.tensor([3, 0, 3, 1])
Parameters = dict[str, Tensor]


def vision_transformer() -> nn.Module:
    """torchvision's, with a classifier as a trained one has."""
    torch.manual_seed(0)
    model = torchvision_vit().eval()
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def plain(seed: int = 0) -> nn.Module:
    """Of a size at which every layer counts."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 36), nn.Tanh(), nn.Linear(36, 5))


def parameters(module: nn.Module) -> Parameters:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def inspect(module: nn.Module, previous: Parameters | None, size: int = 4) -> Report:
    """Without labels: by the weights alone."""
    return Detector().inspect(received_by(module, photographs(32, 1)[..., :size, :size], previous=previous))


@pytest.mark.parametrize("known", [False, True])
def test_projections_of_attention_are_read(known: bool) -> None:
    module = vision_transformer()
    honest = parameters(module)
    own = Detector().inspect(received_by(module, photographs(32, 4), LABELS, previous=honest))
    assert not own.suspicious, own.reason
    with torch.no_grad():
        weight = module.encoder.layers[0].self_attention.in_proj_weight
        weight.copy_(torch.randn(48).expand(144, 48))
        weight[72:] = 0
        nn.init.normal_(module.encoder.pos_embedding)
    received = received_by(module, photographs(32, 4), LABELS, previous=honest if known else None)
    found = {finding.statistic: finding for finding in Detector().inspect(received).findings if finding.alarms}
    expected = {"dead_rows": 0.5, "bins": 0.5} | ({"distance": found["distance"].value} if known else {})
    assert {name: finding.value for name, finding in found.items()} == expected
    assert {finding.about for finding in found.values()} == {
        "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"
    }


def test_projections_of_their_own_are_read_too() -> None:
    attention = nn.MultiheadAttention(64, 2, kdim=32, vdim=48)
    module = nn.Sequential(attention, nn.Linear(64, 40))
    with torch.no_grad():
        attention.v_proj_weight.copy_(torch.randn(48).expand(64, 48))
    (found,) = Detector({"bins": 0.2}).inspect(Received(module, None)).findings
    assert (found.value, found.about) == (1.0, "0.v_proj_weight")


def test_what_is_not_read_is_named() -> None:
    module = vision_transformer()
    assert inspect(module, None, 32).unread == ("class_token", "encoder.pos_embedding")
    assert inspect(plain(), None).unread == ()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("entry", [(0, 0), (39, 47)])
def test_a_number_that_is_none_alarms_in_any_layer_and_round(number: float, entry: tuple[int, int]) -> None:
    for layer in (1, 3):
        for previous in (None, parameters(plain())):
            module = plain()
            with torch.no_grad():
                module[layer].weight[min(entry[0], 35), min(entry[1], 39)] = number
            report = inspect(module, previous)
            assert report.suspicious
            assert report.score == math.inf
            assert f"{layer}.weight" in report.reason
            assert ("distance nan" in report.reason) == (previous is not None)


def test_large_numbers_do_not_overflow() -> None:
    module, honest = plain(), parameters(plain())
    with torch.no_grad():
        module[3].weight.copy_(1e20 * torch.randn(36, 40))
    assert float(module[3].weight.detach().norm()) == math.inf  # in float32
    report = inspect(module, honest)
    assert "distance 1," in report.reason
    assert report.score == pytest.approx(1 / 0.372)
    one, other = torch.tensor([3e38, 0.0]), torch.tensor([0.0, 2e38])
    assert relative_change(one, other) == pytest.approx(math.hypot(3, 2) / 5)


def without(previous: Parameters, name: str) -> Parameters:
    return {own: value for own, value in previous.items() if own != name}


@pytest.mark.parametrize("name", ["1.weight", "5.weight"])
def test_a_layer_that_the_last_model_lacks_or_has_otherwise_alarms(name: str) -> None:
    honest = parameters(plain())
    for previous in (without(honest, name), honest | {name: honest[name][:-1]}, honest | {name: honest[name].T}):
        report = inspect(plain(), previous)
        assert f"distance 1, threshold 0.372 ({name} is not in the last model" in report.reason
        assert ("row_norms 1" in report.reason) == (name == "5.weight")
    assert not inspect(plain(), honest).suspicious


@pytest.mark.parametrize(
    ("previous", "words"),
    [
        (
            {f"module.{name}": value for name, value in parameters(plain()).items()},
            r"they begin with module\.1\.weight",
        ),
        ({}, "there are none"),
    ],
)
def test_a_last_model_of_other_names_is_refused(previous: Parameters, words: str) -> None:
    with pytest.raises(UsageError, match=f"^previous holds no parameter under the model's name .{words}.*$"):
        inspect(plain(), previous)


def test_weights_that_are_computed_are_no_new_layers() -> None:
    module = plain()
    parametrizations.weight_norm(module[3])
    parametrizations.weight_norm(module[5])
    report = inspect(module, parameters(module))
    assert not report.suspicious, report.reason
    assert (
        report.not_stated["row_norms"]
        == "5.weight is computed from other parameters, which the last model does not give"
    )
