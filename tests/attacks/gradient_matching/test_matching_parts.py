"""The parts against formulas and oracles: simulated gradients, distances, priors, labels, schedules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from small_vit import CLASSES, small_vit, view
from torch.nn import functional as F

from attacks.gradient_matching.distances import Cosine, LayerwiseL2, PositionCosine, SquaredL2
from attacks.gradient_matching.gradients import Product, Target, Value
from attacks.gradient_matching.labels import infer_labels
from attacks.gradient_matching.optimisers import CosineDecay, StepDecay
from attacks.gradient_matching.priors import GroupConsistency, PatchBorders, TotalVariation
from attacks.gradient_matching.reading import Reading, read
from attacks.gradient_matching.simulation import OnePass, Unrolled, math_attention, simulate
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_pass_gives_each_lane_its_own_gradient(masked: bool, batch: int) -> None:
    model = small_vit(masked=masked)
    observation, _ = view(model, count=batch)
    masks = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) < 0.4 if masked else torch.zeros(2, 0)
    readings = [Reading(observation.gradients, mask if masked else None, ()) for mask in masks]
    chosen, target = simulate(observation, readings, restarts=1)
    assert isinstance(chosen, OnePass)
    images = torch.randn(2, batch, 3, 16, 16, requires_grad=True)
    labels = torch.randint(0, CLASSES, (2, batch))
    with math_attention():
        parts = chosen.gradients(images, labels)
    for lane in range(2):
        mask = masks[lane : lane + 1].expand(batch, -1) if masked else None
        pixels = images[lane].detach() * 0.25 + 0.5
        expected = observe(model, pixels, labels[lane], mask).gradients
        assert set(parts) == {n for n, g in expected.items() if g.any()}
        for name, part in parts.items():
            held = torch.stack([expected[name]] * 2)
            scale = expected[name].square().sum()
            torch.testing.assert_close(part.square()[lane], scale, rtol=1e-3, atol=1e-9)
            torch.testing.assert_close(part.dot(held)[lane], scale, rtol=1e-3, atol=1e-9)
            assert float(part.gap(held)[lane].detach()) < 1e-6 * float(scale) + 1e-12
    assert set(target.values) == set(parts)


def test_both_engines_have_the_same_second_derivative() -> None:
    observation, _ = view(small_vit(), count=2)
    fast, target = simulate(observation, [read(observation)], restarts=1)
    slow = Unrolled(observation, None)
    slow.names = fast.names
    images = torch.randn(1, 2, 3, 16, 16, requires_grad=True)
    labels = torch.tensor([[1, 2]])
    for distance in (Cosine(), SquaredL2(), LayerwiseL2(weights={"blocks.1": 0.5}), PositionCosine("pos_embed")):
        with math_attention():
            losses = [distance(engine.gradients(images, labels), target) for engine in (fast, slow)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
        first, second = (torch.autograd.grad(loss.sum(), images)[0] for loss in losses)
        assert float((first - second).norm() / second.norm()) < 1e-3


def test_a_network_that_is_not_understood_falls_to_the_general_engine() -> None:
    model = build_model("vit_mini_32_nope", num_classes=8, weights="random")
    observation = observe(model, photographs(32, 1))
    assert isinstance(simulate(observation, [read(observation)], 1)[0], OnePass)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(8))
    network(photographs(32, 1))
    odd = dataclasses.replace(model, module=network)
    observation = observe(odd, photographs(32, 1))
    assert isinstance(simulate(observation, [read(observation)], 1)[0], Unrolled)


def test_products_are_what_they_stand_for() -> None:
    outputs, inputs = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    target = torch.randn(2, 7, 6, dtype=torch.float64)
    for few in (slice(None), slice(0, 5)):
        lazy = Product(outputs[..., few], inputs)
        plain = Value(outputs[..., few].mT @ inputs)
        for number in ("dot", "gap"):
            torch.testing.assert_close(getattr(lazy, number)(target[:, few]), getattr(plain, number)(target[:, few]))
        torch.testing.assert_close(lazy.square(), plain.square())


def test_distances_by_their_formulas() -> None:
    simulated = {"a": torch.tensor([[3.0, 0.0]]), "b.c": torch.tensor([[0.0, 4.0]])}
    received = {"a": torch.tensor([[0.0, 0.0]]), "b.c": torch.tensor([[0.0, 1.0]])}
    parts, target = {n: Value(t) for n, t in simulated.items()}, Target.of(received)
    assert float(SquaredL2()(parts, target)) == pytest.approx(18.0)
    assert float(SquaredL2(scale=0.5, relative=True)(parts, target)) == pytest.approx(9.0)
    assert float(LayerwiseL2(weights={"b": 2.0})(parts, target)) == pytest.approx(9.0)
    assert float(Cosine()(parts, target)) == pytest.approx(1 - 4 / 5)
    assert float(PositionCosine("b.c")(parts, target)) == pytest.approx(0.0, abs=1e-6)


def test_priors_by_their_formulas() -> None:
    flat = torch.zeros(1, 2, 1, 1, 4, 4)
    flat[0, 1, ..., 2:] = 1.0  # a jump between columns 1 and 2, which is a patch border for p = 2
    assert TotalVariation(3.0)(flat)[0].tolist() == pytest.approx([0.0, 1.0])
    assert PatchBorders(1.0, 2)(flat)[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)
    wide = torch.zeros(1, 1, 1, 1, 8, 8)
    wide[..., 2:] = 1.0  # the jump lies inside the patches of 4
    assert float(PatchBorders(1.0, 4)(wide)) == pytest.approx(0.0, abs=1e-5)
    assert GroupConsistency(4.0)(flat)[0].tolist() == pytest.approx([0.5, 0.5])


def test_schedules_by_their_formulas() -> None:
    assert [round(StepDecay()(s, 800), 6) for s in (0, 298, 299, 500, 700, 799)] == [1, 1, 0.1, 0.01, 0.001, 0.001]
    assert CosineDecay()(50, 100) == pytest.approx(0.5)
    assert CosineDecay(warmup=0.1)(4, 100) == pytest.approx(5 / 11)
    assert CosineDecay()(99, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


@pytest.mark.parametrize("trained", [False, True])
def test_labels_of_one_image_are_exact_and_those_of_a_batch_nearly(trained: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    right = total = 0
    for batch in (1, 1, 1, 2, 4, 8):
        for _ in range(20):
            labels = torch.randint(0, 10, (batch,), generator=generator)
            logits = torch.randn(batch, 10, generator=generator) * 0.3
            if trained:
                logits[torch.arange(batch), labels] += 2.0
            bias = (logits.softmax(dim=1) - F.one_hot(labels, 10)).mean(dim=0)
            found = infer_labels(bias, torch.full((10,), 0.1), batch)
            assert len(found) == batch
            if batch == 1:
                assert torch.equal(found, labels)
            counts = [torch.bincount(t, minlength=10) for t in (found, labels)]
            right += int(torch.minimum(*counts).sum())
            total += batch
    assert right / total > (0.85 if trained else 0.97)
