"""Each statistic of a received model against a slow computation, row by row and image by image."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.registry import Registry, UsageError
from fedmjp.detect import STATISTICS, Detector, Measurement, Received, Statistic, received_by
from fedmjp.models import build_model
from fedmjp.models.weights import classes_of
from tests.conftest import photographs

LABELS = torch.tensor([3, 0, 3, 7, 1])


class Small(nn.Module):
    """Two layers, a term of rank 4 and a classifier of 9 classes, with parallel, dead and scaled rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = nn.Linear(48, 40), nn.Linear(40, 36), nn.Linear(36, 9)
        self.down, self.up = nn.Linear(36, 4), nn.Linear(4, 36)
        with torch.no_grad():
            self.first.weight[4] = -2 * self.first.weight[1] + 0.01 * torch.randn(48)
            self.first.weight[7] = 0.5 * self.first.weight[1]
            self.second.weight[3] *= 1e-3
            self.up.weight[1:] = self.up.weight[0] * torch.randn(35, 1)  # all parallel, and changed from seed to seed
            self.head.weight[5] *= 3
            self.head.bias[2] += 4

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 9) of (B, 3, 4, 4); images of a negative mean reach the second layer only as zeros."""
        gate = (images.mean(dim=(1, 2, 3)) > 0).to(images)[:, None]
        hidden = torch.tanh(self.second(torch.tanh(self.first(images.flatten(1)))))
        return self.head((hidden + self.up(self.down(hidden))) * gate)


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def rows(weight: Tensor) -> list[list[float]]:
    return weight.detach().double().flatten(1).tolist()


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (norm(one) * norm(other))


def own_gradients(module: nn.Module, images: Tensor, labels: Tensor, head: bool) -> list[float]:
    """Norm of each image's gradient at the classifier, or below it."""
    named = [p for n, p in module.named_parameters() if n.startswith("head.") == head]
    found = []
    for image, label in zip(images, labels, strict=True):
        loss = functional.cross_entropy(module(image[None]), label[None])
        gradients = torch.autograd.grad(loss, named)
        found.append(norm([value for g in gradients for value in g.flatten().double().tolist()]))
    return found


def changed_norms(now: Small, then: Small, images: Tensor) -> float:
    pairs = zip(map(norm, rows(now.head.weight)), map(norm, rows(then.head.weight)), strict=True)
    return max(abs(a - b) / max(a, b) for a, b in pairs)


def spread_rows(now: Small, then: Small, images: Tensor) -> float:
    sizes = sorted(map(norm, rows(now.head.weight)))
    return 1 - sizes[4] / sizes[-1]


def dead(now: Small, then: Small, images: Tensor) -> float:
    shares = []
    for layer in (now.first, now.second, now.down, now.up, now.head):
        sizes = [norm(row) for row in rows(layer.weight)]
        shares.append(sum(size < 0.01 * max(sizes) for size in sizes) / len(sizes))
    return max(shares)


def parallel(now: Small, then: Small, images: Tensor) -> float:
    shares = []
    for layer in (now.first, now.second):  # the others have fewer than 32 rows or columns
        own = rows(layer.weight)
        largest = max(map(norm, own))
        alive = [row for row in own if norm(row) >= 0.01 * largest]
        like = [any(abs(cosine(a, b)) >= 0.98 for b in alive if b is not a) for a in alive]
        shares.append(sum(like) / len(own))
    return max(shares)


def moved(now: Small, then: Small, images: Tensor) -> float:
    found = []
    for name in ("first", "second", "head"):  # not the small layers, but for the classifier
        a, b = (sum(rows(getattr(model, name).weight), []) for model in (now, then))
        found.append(norm([x - y for x, y in zip(a, b, strict=True)]) / (norm(a) + norm(b)))
    return max(found)


def biases(now: Small, then: Small, images: Tensor) -> float:
    values = now.head.bias.tolist()
    return max(values) - min(values)


def concentrated(now: Small, then: Small, images: Tensor) -> float:
    sent = own_gradients(now, images, LABELS, head=False)
    return (max(sent) / sum(sent) - 1 / 5) / (1 - 1 / 5)


def silent(now: Small, then: Small, images: Tensor) -> float:
    below, head = (own_gradients(now, images, LABELS, head=flag) for flag in (False, True))
    return sum(a < 1e-6 * b for a, b in zip(below, head, strict=True)) / 5


ORACLES: dict[str, Callable[[Small, Small, Tensor], float]] = {
    "row_norms": changed_norms,
    "row_spread": spread_rows,
    "dead_rows": dead,
    "bins": parallel,
    "distance": moved,
    "bias_range": biases,
    "concentration": concentrated,
    "silent_images": silent,
}


@pytest.fixture(scope="module")
def images() -> Tensor:
    found = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found[[1, 4]] -= (
        found[[1, 4]].mean(dim=(1, 2, 3), keepdim=True) + 0.5
    )  # these two send nothing below the classifier
    return found


def sent(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_every_statistic_has_an_oracle() -> None:
    assert list(ORACLES) == list(STATISTICS)


@pytest.mark.parametrize("name", ORACLES)
def test_a_statistic_is_what_its_oracle_computes(name: str, images: Tensor) -> None:
    now, then = Small(1), Small(2)
    found = STATISTICS.get(name)().measure(received_by(now, images, LABELS, previous=sent(then), at_once=2))
    expected = ORACLES[name](now, then, images)
    assert expected > 0
    assert found.value == pytest.approx(expected, rel=1e-5)
    assert found.about


def test_one_image_makes_no_statement_of_concentration(images: Tensor) -> None:
    report = Detector().inspect(received_by(Small(1), images[:1], LABELS[:1]))
    assert "a batch of one image" in report.not_stated["concentration"]
    assert set(report.not_stated) == {"concentration", "row_norms", "distance"}
    assert "the first model" in report.not_stated["distance"]


def test_without_a_batch_the_weights_alone_are_checked(images: Tensor) -> None:
    report = Detector().inspect(received_by(Small(1), images, previous=sent(Small(1))))
    assert set(report.not_stated) == {"concentration", "silent_images"}
    assert report.suspicious  # by the bias and the parallel rows
    assert "bias_range 4" in report.reason
    assert "row_norms" not in report.reason


def test_a_loss_that_cannot_be_taken_apart_makes_no_statement() -> None:
    """The batch norm of the small ResNet mixes images; its running statistics cannot be changed under vmap."""
    built = build_model("resnet_micro_32", num_classes=8, weights="random")
    built.module.train()
    report = Detector().inspect(received_by(built.module, photographs(32, 3), LABELS[:3]))
    assert {"concentration", "silent_images"} <= set(report.not_stated)


def test_a_user_adds_a_statistic(images: Tensor, monkeypatch) -> None:
    table: Registry[type[Statistic]] = Registry("statistic")

    @table.register("mine")
    class Mine(Statistic):
        def measure(self, received: Received) -> Measurement:
            """The largest weight of the first layer."""
            return Measurement(float(received.module.first.weight.detach().abs().max()), "first")

    monkeypatch.setattr("fedmjp.detect.detector.STATISTICS", table)
    report = Detector({"mine": 0.1}).inspect(received_by(Small(1), images))
    assert report.suspicious
    assert report.findings[0].about == "first"
    assert not Detector({"mine": 10.0}).inspect(received_by(Small(1), images)).suspicious


def test_bad_thresholds_are_one_line() -> None:
    with pytest.raises(UsageError, match="did you mean 'bins'"):
        Detector({"bin": 0.1})
    with pytest.raises(UsageError, match="threshold of bins must be positive"):
        Detector({"bins": 0.0})


def test_image_norms_are_those_of_the_trained_parameters(images: Tensor) -> None:
    module = Small(1)
    found = received_by(module, images, LABELS, at_once=3).images
    assert found.below.tolist() == pytest.approx(own_gradients(module, images, LABELS, head=False), rel=1e-5, abs=1e-12)
    assert found.classifier.tolist() == pytest.approx(own_gradients(module, images, LABELS, head=True), rel=1e-5)


@pytest.mark.parametrize("name", ["vit_mini_32", "vit_mini_32_nope", "vit_mini_64", "vit_mini_64_mjp"])
def test_shipped_weights_do_not_alarm(name: str) -> None:
    built = build_model(name, num_classes=classes_of(name, "auto"), weights="auto")
    report = Detector().inspect(received_by(built.module.eval(), torch.zeros(1, 3, built.image_size, built.image_size)))
    assert not report.suspicious, report.reason
    assert len(report.not_stated) == 4
