"""The parts compared with formulas and references: simulated gradients, distances, priors, labels, schedules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from small_vit import CLASSES, small_vit, view
from torch.nn import functional as F

from attacks.gradient_matching.differences import FiniteDifferences
from attacks.gradient_matching.distances import Cosine, LayerwiseL2, PositionCosine, SquaredL2
from attacks.gradient_matching.gradients import Target
from attacks.gradient_matching.labels import infer_labels
from attacks.gradient_matching.matched_update import MatchedUpdate, extract_matched_update
from attacks.gradient_matching.optimisers import CosineDecay, StepDecay
from attacks.gradient_matching.priors import GroupConsistency, PatchBorders, TotalVariation
from attacks.gradient_matching.simulation import build_simulation
from attacks.gradient_matching.unrolled import Unrolled, math_attention
from fedmjp.models import build_model
from tests.conftest import observe, photographs


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_each_simulated_client_gets_its_own_gradient(exact: bool, masked: bool, batch: int) -> None:
    model = small_vit(masked=masked)
    observation, _ = view(model, count=batch)
    masks = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) < 0.4 if masked else torch.zeros(2, 0)
    updates = [MatchedUpdate(observation.gradients, mask if masked else None, ()) for mask in masks]
    chosen, target = build_simulation(observation, updates, restarts=1, exact=exact)
    assert isinstance(chosen, Unrolled if exact else FiniteDifferences)
    images = torch.randn(2, batch, 3, 16, 16, requires_grad=True)
    labels = torch.randint(0, CLASSES, (2, batch))
    with math_attention():
        found = chosen.gradients(images, labels)
    for client in range(2):
        mask = masks[client : client + 1].expand(batch, -1) if masked else None
        pixels = images[client].detach() * 0.25 + 0.5
        expected = observe(model, pixels, labels[client], mask).gradients
        assert set(found) == {n for n, g in expected.items() if g.any()}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient[client], expected[name], rtol=1e-3, atol=1e-6)
    assert set(target.values) == set(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_finite_differences_approximate_the_derivatives(masked: bool, dtype: torch.dtype) -> None:
    model = small_vit(masked=masked)
    model.module.to(dtype)
    images = photographs(16, 4).to(dtype).unflatten(0, (2, 2))
    masks = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) < 0.4 if masked else (None, None)
    labels = torch.tensor([[1, 2], [3, 1]])
    held = [None if mask is None else mask.expand(2, -1) for mask in masks]
    views = [observe(model, *case) for case in zip(images, labels, held, strict=True)]
    updates = [MatchedUpdate(v.gradients, mask, ()) for v, mask in zip(views, masks, strict=True)]
    engines = [build_simulation(views[0], updates, restarts=1, exact=exact) for exact in (False, True)]
    assert [type(engine) for engine, _ in engines] == [FiniteDifferences, Unrolled]
    start = torch.randn(2, 2, 3, 16, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for distance in (Cosine(), SquaredL2(), LayerwiseL2(weights={"blocks.1": 0.5}), PositionCosine("pos_embed")):
        losses, slopes = [], []
        for engine, target in engines:
            guess = start.clone().requires_grad_()
            with math_attention():
                losses.append(distance(engine.gradients(guess, labels), target))
                slopes.append(torch.autograd.grad(losses[-1].sum(), guess)[0])
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
        for client in range(2):
            error = float((slopes[0][client] - slopes[1][client]).norm() / slopes[1][client].norm())
            assert error < (5e-2 if dtype == torch.float32 else 1e-5), (distance, client)


def test_a_network_that_vmap_does_not_support_uses_autograd() -> None:
    model = build_model("vit_mini_32_nope", num_classes=8, weights="random")
    observation = observe(model, photographs(32, 1))
    assert isinstance(build_simulation(observation, [extract_matched_update(observation)], 1)[0], FiniteDifferences)

    class Odd(torch.nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            scale = float(images.detach().abs().max())  # a Python number that depends on the data
            return super().forward(images / scale)

    network = Odd(torch.nn.Conv2d(3, 4, 3), torch.nn.Sigmoid(), torch.nn.Flatten(), torch.nn.LazyLinear(8))
    network(photographs(32, 1))
    odd = dataclasses.replace(model, module=network)
    observation = observe(odd, photographs(32, 1))
    assert isinstance(build_simulation(observation, [extract_matched_update(observation)], 1)[0], Unrolled)


def test_distances_equal_their_formulas() -> None:
    simulated = {"a": torch.tensor([[3.0, 0.0]]), "b.c": torch.tensor([[0.0, 4.0]])}
    received = {"a": torch.tensor([[0.0, 0.0]]), "b.c": torch.tensor([[0.0, 1.0]])}
    target = Target.of(received)
    assert float(SquaredL2()(simulated, target)) == pytest.approx(18.0)
    assert float(SquaredL2(scale=0.5, relative=True)(simulated, target)) == pytest.approx(9.0)
    assert float(LayerwiseL2(weights={"b": 2.0})(simulated, target)) == pytest.approx(9.0)
    assert float(Cosine()(simulated, target)) == pytest.approx(1 - 4 / 5)
    assert float(PositionCosine("b.c")(simulated, target)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("norm", [1.0, 3e-7, 1e-9])
def test_distances_of_directions_do_not_depend_on_the_size_of_the_gradients(norm: float) -> None:
    received = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    received *= norm / received.norm()
    other = received.flip(1)
    target = Target.of({"a": received})
    cosine = float(F.cosine_similarity(other.double(), received.double(), eps=0.0))
    for distance in (Cosine(), PositionCosine("a")):
        assert float(distance({"a": received}, target)) == pytest.approx(0.0, abs=1e-6)
        assert float(distance({"a": other}, target)) == pytest.approx(1 - cosine, rel=1e-5)
        found = torch.zeros(1, 50, requires_grad=True)
        distance({"a": found}, target).backward()
        assert found.grad.isfinite().all()
    layers = LayerwiseL2(relative=True)
    assert float(layers({"a": 1.001 * received}, target)) == pytest.approx(1e-3, rel=1e-3)
    assert float(layers({"a": received}, target)) < 1e-9


def test_priors_equal_their_formulas() -> None:
    flat = torch.zeros(1, 2, 1, 1, 4, 4)
    flat[0, 1, ..., 2:] = 1.0  # a jump between columns 1 and 2, which is a patch border for p = 2
    assert TotalVariation(3.0)(flat)[0].tolist() == pytest.approx([0.0, 1.0])
    assert PatchBorders(1.0, 2)(flat)[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)
    wide = torch.zeros(1, 1, 1, 1, 8, 8)
    wide[..., 2:] = 1.0  # the jump lies inside the patches of 4
    assert float(PatchBorders(1.0, 4)(wide)) == pytest.approx(0.0, abs=1e-5)
    assert PatchBorders(1.0, 2)(flat[..., :2, :])[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)  # one patch high
    assert PatchBorders(1.0, 4)(flat)[0].tolist() == pytest.approx([0.0, 0.0], abs=1e-5)  # one patch
    assert GroupConsistency(4.0)(flat)[0].tolist() == pytest.approx([0.5, 0.5])


def test_schedules_equal_their_formulas() -> None:
    assert [round(StepDecay()(s, 800), 6) for s in (0, 298, 299, 500, 700, 799)] == [1, 1, 0.1, 0.01, 0.001, 0.001]
    assert CosineDecay()(50, 100) == pytest.approx(0.5)
    assert CosineDecay(warmup=0.1)(4, 100) == pytest.approx(5 / 11)
    assert CosineDecay()(99, 100) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


@pytest.mark.parametrize("trained", [False, True])
def test_inferred_labels_are_exact_for_one_image_and_mostly_right_for_a_batch(trained: bool) -> None:
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
