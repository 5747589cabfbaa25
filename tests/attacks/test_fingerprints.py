"""What was done to an update is recognised, and honest gradients of several models raise no alarm."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, Observation
from attacks.fingerprints import find_weight_decay, recognise, repair, repaired
from attacks.identities import classifier_sums
from attacks.linear.position_rows import read_position_rows
from attacks.tokenizer import logits_of
from fedmjp.defenses.chain import read_defense
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from fedmjp.objectives import client_loss
from tests.attacks.models import (
    FixedPositions,
    ReleasedMJP,
    hugging_face_deit,
    hugging_face_vit,
    timm_vit,
    torchvision_vit,
)
from tests.conftest import observe, photographs

HALF = (0.5, 0.5, 0.5)


def resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=5).eval()


def shipped() -> nn.Module:
    return build_model("vit_mini_32", num_classes=5, weights="auto").module


def trained_classifier() -> nn.Module:
    """torchvision's with a classifier that is not zero."""
    model = torchvision_vit()
    nn.init.normal_(model.heads[0].weight, std=0.02)
    return model


class NeckedViT(nn.Module):
    """Its classifier is registered before the layers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.trunk, self.neck = nn.Linear(24, 5), timm_vit(), nn.Linear(48, 24)
        self.trunk.reset_classifier(0)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.neck(self.trunk(images)))


MODELS = [NeckedViT, timm_vit, trained_classifier, hugging_face_vit, hugging_face_deit, ReleasedMJP, resnet, shipped]


def observation_of(model: nn.Module, gradients: dict[str, Tensor], batch: int, **changes) -> Observation:
    return Observation(gradients, model, batch, (3, 32, 32), HALF, HALF, **changes)


def honest(make: Callable[[], nn.Module], batch: int = 1, smoothing: float = 0.0) -> Observation:
    """The float32 gradient of one step."""
    torch.manual_seed(0)
    model, images = make(), (photographs(32, batch) - 0.5) / 0.5
    loss = functional.cross_entropy(logits_of(model(images)), torch.arange(batch) % 5, label_smoothing=smoothing)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return observation_of(model, {n: g for n, g in zip(names, found, strict=True) if g is not None}, batch)


def trained(
    kind: type[torch.optim.Optimizer], steps: int = 1, rate: float = 1e-2, make=timm_vit, loss=None, **options
) -> Observation:
    """Weights after some local steps of an optimiser, as the server turns them into an update."""
    torch.manual_seed(0)
    model, loss = make(), loss or functional.cross_entropy
    twin, images = copy.deepcopy(model), (photographs(32, 8) - 0.5) / 0.5
    optimiser = kind(twin.parameters(), lr=rate, **options)
    for step in range(steps):
        optimiser.zero_grad()
        loss(twin(images[step % 8 : step % 8 + 1]), torch.tensor([step % 5])).backward()
        optimiser.step()
    after = dict(twin.named_parameters())
    gradients = {n: (p - after[n]).detach() / rate for n, p in model.named_parameters()}
    return observation_of(model, gradients, 1, kind="weights", local_steps=steps, learning_rate=rate)


def changed(view: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    return dataclasses.replace(view, gradients={n: change(g) for n, g in view.gradients.items()})


def names(view: Observation) -> list[str]:
    return [finding.name for finding in recognise(view)]


@pytest.mark.parametrize("make", MODELS)
def test_sums_over_the_classes_vanish(make: Callable[[], nn.Module]) -> None:
    assert not classifier_sums(honest(make, 2)).is_broken()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("batch", [1, 4])
def test_honest_gradients_raise_no_alarm(make: Callable[[], nn.Module], batch: int) -> None:
    view = honest(make, batch)
    assert recognise(view) == []
    scaled = recognise(changed(view, lambda g: 65536 * g))  # a loss scaled for mixed precision; one image shows it
    assert [(finding.name, finding.fixed) for finding in scaled] == [("scaled_loss", True)] * (batch == 1)
    same, found = repair(view)
    assert not found
    assert all(torch.equal(same.gradients[n], g) for n, g in view.gradients.items())


@pytest.mark.parametrize(
    "view",
    [
        lambda: honest(timm_vit),
        lambda: changed(honest(timm_vit), lambda g: 7 * g.half()),
        lambda: trained(torch.optim.SGD, weight_decay=0.1),
        lambda: trained(torch.optim.Adam, 3, rate=1e-3),
    ],
    ids=["honest", "scaled half precision", "weight decay", "adaptive steps"],
)
def test_the_short_way_changes_an_update_as_the_long_one_does(view: Callable[[], Observation]) -> None:
    short, (long, _) = repaired(view()), repair(view())
    assert short.gradients.keys() == long.gradients.keys()
    assert all(torch.equal(short.gradients[n], g) for n, g in long.gradients.items())
    assert short.learning_rate == long.learning_rate


@pytest.mark.parametrize("options", [{}, {"rate": 1e-4}, {"rate": 1e-6}, {"steps": 4}, {"momentum": 0.9}])
def test_weights_after_plain_sgd_raise_no_alarm(options: dict) -> None:
    assert names(trained(torch.optim.SGD, **options)) == []


def test_smoothed_labels_and_masked_positions_raise_no_alarm() -> None:
    assert names(honest(timm_vit, smoothing=0.1)) == []
    model = build_model("vit_mini_32_mjp", num_classes=5, weights="random", dal="linear")
    assert names(observe(model, photographs(32, 1), mask=torch.arange(64)[None] < 20)) == []


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        (torch.optim.Adam, 1, "the same magnitude: this is the first step of Adam"),
        (torch.optim.AdamW, 1, "the same magnitude: this is the first step of Adam"),
        (torch.optim.Adam, 3, "an adaptive optimiser"),
        (torch.optim.Adam, 8, "an adaptive optimiser"),
        (torch.optim.RMSprop, 3, "an adaptive optimiser"),
        (torch.optim.Adagrad, 3, "an adaptive optimiser"),
    ],
)
def test_adaptive_optimisers(kind: type, steps: int, words: str) -> None:
    found = recognise(trained(kind, steps, rate=1e-3))
    assert [finding.name for finding in found] == ["adaptive_steps"]
    assert words in found[0].sentence
    assert not found[0].fixed


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_many_steps_of_adaptive_optimisers(kind: type) -> None:
    """Their entries are no longer of one size; sums that vanish for any number of gradients are what shows them."""
    found = recognise(trained(kind, 30, rate=1e-3))
    assert [(finding.name, finding.hinders) for finding in found] == [("adaptive_steps", True)]
    assert not names(trained(torch.optim.SGD, 30))
    heavy = trained(torch.optim.SGD, 30, momentum=0.9, weight_decay=0.05)
    assert "adaptive_steps" not in names(heavy)


def binary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, functional.one_hot(labels, logits.shape[1]).float())


def test_what_a_model_without_positions_cannot_show_is_said_to_be_assumed() -> None:
    for options in (
        {"kind": torch.optim.Adam, "steps": 30, "rate": 1e-3},
        {"kind": torch.optim.SGD, "loss": binary_loss},
    ):
        found = recognise(trained(make=FixedPositions, **options))
        unknown = next(f for f in found if f.name in ("unknown_optimiser", "adaptive_steps"))
        assert unknown.name == "adaptive_steps" or "plain SGD is assumed" in unknown.sentence
    assert names(trained(torch.optim.SGD, make=FixedPositions)) == []


def test_moments_of_adam() -> None:
    view = honest(timm_vit)
    assert names(changed(view, torch.square)) == ["second_moments"]
    assert names(changed(view, lambda g: 0.1 * g)) == ["scaled_loss"]  # the first moment after one step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    view = honest(timm_vit)
    for sent in (changed(view, lambda g: g.to(dtype)), changed(view, lambda g: g.to(dtype).float())):
        found = recognise(sent)
        assert [finding.name for finding in found] == ["precision"]
        assert str(dtype).removeprefix("torch.") in found[0].sentence


def test_half_precision_of_returned_weights() -> None:
    view = trained(torch.optim.SGD)
    weights = dict(view.model.named_parameters())
    rounded = {n: (weights[n] - (weights[n] - 1e-2 * g).half()).detach() / 1e-2 for n, g in view.gradients.items()}
    found = recognise(dataclasses.replace(view, gradients=rounded))
    assert [finding.name for finding in found] == ["precision"]
    assert "returned weights are float16" in found[0].sentence


def test_eight_bits() -> None:
    def quantise(gradient: Tensor) -> Tensor:
        step = gradient.abs().max() / 127
        return (gradient / step).round() * step

    found = recognise(changed(honest(timm_vit), quantise))
    assert [finding.name for finding in found] == ["precision"]
    assert "int8" in found[0].sentence


def affine(rows: Tensor) -> Tensor:
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    step = ((high - low) / 255).clamp(min=1e-30)
    return ((rows - low) / step).round() * step + low


def symmetric(rows: Tensor) -> Tensor:
    step = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
    return (rows / step).round() * step


@pytest.mark.parametrize("quantise", [symmetric, affine])
@pytest.mark.parametrize("of_columns", [False, True])
def test_eight_bits_a_channel(quantise: Callable[[Tensor], Tensor], of_columns: bool) -> None:
    def each(gradient: Tensor) -> Tensor:
        if gradient.dim() < 2:
            return gradient
        rows = gradient.flatten(1) if not of_columns else gradient.flatten(1).mT
        rows = quantise(rows)
        return (rows.mT if of_columns else rows).reshape(gradient.shape)

    found = recognise(changed(honest(timm_vit), each))
    assert [finding.name for finding in found] == ["precision"]
    assert "each channel" in found[0].sentence
    assert names(changed(honest(timm_vit), lambda g: g * (1 + 1e-4 * torch.rand(g.shape[-1])))) != ["precision"]


@pytest.mark.parametrize("kept", [0.01, 0.1, 0.5])
def test_top_k(kept: float) -> None:
    view = honest(timm_vit)
    sizes = torch.cat([g.abs().flatten() for g in view.gradients.values()]).sort(descending=True).values
    found = recognise(changed(view, lambda g: g * (g.abs() >= sizes[int(kept * len(sizes))])))
    assert [finding.name for finding in found] == ["sparsification"]
    assert not found[0].fixed


@pytest.mark.parametrize("bound", [1.0, 0.5, 0.01, 2.5])
def test_clipping(bound: float) -> None:
    view = honest(timm_vit)
    norm = view.gradient_norm()
    assert norm > bound
    found = recognise(changed(view, lambda g: g * (bound / (norm + 1e-6))))
    assert [(finding.name, finding.fixed) for finding in found] == [("clipping", True)]
    assert f"is {bound:g}" in found[0].sentence


@pytest.mark.parametrize("make", [timm_vit, hugging_face_vit, ReleasedMJP])
@pytest.mark.parametrize("level", [1e-2, 1e-1])
def test_noise_and_its_level(make: Callable[[], nn.Module], level: float) -> None:
    view, generator = honest(make), torch.Generator().manual_seed(0)
    rms = view.gradient_norm() / sum(g.numel() for g in view.gradients.values()) ** 0.5
    deviation = level * rms
    noisy = changed(view, lambda g: g + deviation * torch.randn(g.shape, generator=generator))
    found = recognise(noisy)
    assert [finding.name for finding in found] == ["noise"]
    reported = float(found[0].sentence.split("deviation ")[1].split(" ")[0])
    assert reported == pytest.approx(deviation, rel=0.3)


@pytest.fixture(scope="module")
def localised() -> list[Observation]:
    """Updates of MJP clients with a localisation loss, each under another mask."""
    model, image = build_model("vit_mini_32_mjp", num_classes=5, weights="random", dal="nonlinear"), photographs(32, 1)
    parameters, views = dict(model.module.named_parameters()), []
    for seed in range(12):
        mask = torch.rand(1, 64, generator=torch.Generator().manual_seed(seed)) < 0.1 * (seed % 9 + 1)
        loss = client_loss(model, image, torch.tensor([0]), mask, {"dal": 0.01})
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
        views.append(observation_of(model.module, gradients, 1))
    return views


def test_a_localisation_loss_is_no_noise(localised) -> None:
    assert [names(view) for view in localised] == [[]] * len(localised)


@pytest.mark.parametrize("level", [1e-2, 1e-1])
def test_noise_beside_a_localisation_loss_is_found(localised, level: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for view in localised:
        deviation = level * view.gradient_norm() / sum(g.numel() for g in view.gradients.values()) ** 0.5
        noisy = changed(view, lambda g, size=deviation: g + size * torch.randn(g.shape, generator=generator))
        found = recognise(noisy)
        assert "noise" in [finding.name for finding in found]


def test_another_loss_is_no_noise() -> None:
    torch.manual_seed(0)
    model, images = timm_vit(), photographs(32, 1)
    loss = functional.binary_cross_entropy_with_logits(model(images), torch.eye(5)[:1])
    pairs = zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    assert names(observation_of(model, {n: g for (n, _), g in pairs}, 1)) == ["another_loss"]


EXEMPT = {
    "nothing": lambda name, weight: False,
    "vectors": lambda name, weight: weight.dim() < 2,
    "vectors and embeddings": lambda name, weight: weight.dim() < 2 or name in ("pos_embed", "cls_token", "unk_embed"),
}


def decayed(view: Observation, decay: float, exempt: str) -> Observation:
    weights = dict(view.model.named_parameters())
    gradients = {
        n: g if EXEMPT[exempt](n, weights[n]) else g + decay * weights[n].detach() for n, g in view.gradients.items()
    }
    return dataclasses.replace(view, gradients=gradients)


@pytest.mark.parametrize("decay", [0.05, 5e-4])
@pytest.mark.parametrize("exempt", EXEMPT)
def test_weight_decay_is_named_and_removed(decay: float, exempt: str) -> None:
    model = build_model("vit_mini_64", num_classes=8, weights="random")
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    image = photographs(64, 1)
    view = observe(model, image)
    sent = decayed(view, decay, exempt)
    assert find_weight_decay(sent) == pytest.approx(decay, rel=0.01)
    assert not next(f for f in recognise(sent) if f.name == "weight_decay").fixed
    clean, found = repair(sent)
    assert [(finding.name, finding.fixed) for finding in found] == [("weight_decay", True)]
    for name in ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "blocks.0.mlp.fc1.weight"):
        error = (clean.gradients[name] - view.gradients[name]).norm() / view.gradients[name].norm()
        assert error < 1e-3, name
    attack = ATTACKS.get("patch_embedding")()
    assert psnr(attack([clean]).images, image)[0] > psnr(attack([sent]).images, image)[0] + (5 if decay > 1e-2 else -1)


@pytest.mark.parametrize("dal", ["none", "linear"])
@pytest.mark.parametrize("exempt", EXEMPT)
def test_masked_rows_are_zero_again_without_weight_decay(dal: str, exempt: str) -> None:
    model = build_model("vit_mini_32_mjp", num_classes=5, weights="random", dal=dal)
    mask = torch.arange(64) < 20
    view = observe(model, photographs(32, 1), mask=mask[None])
    clean, found = repair(decayed(view, 0.05, exempt))
    assert [finding.name for finding in found] == ["weight_decay"]
    assert torch.equal(read_position_rows(clean).masked, mask)


@pytest.mark.parametrize(
    ("entry", "name", "words"),
    [
        ("quantise:quantise_format=sign", "precision", "each parameter's entries have one magnitude"),
        ("quantise:quantise_format=sign,quantise_per=row", "precision", "each channel's entries have one magnitude"),
        ("quantise:quantise_format=int4", "precision", "each parameter's gradient lies on a grid of 15 values"),
        (
            "quantise:quantise_rounding=stochastic,quantise_per=row",
            "precision",
            "each channel's gradient lies on a grid",
        ),
        ("topk", "sparsification", "only the largest were sent"),
        ("topk:topk_choice=random", "sparsification", "a random choice was sent"),
    ],
)
def test_what_a_defence_makes_of_the_entries_is_named(entry: str, name: str, words: str) -> None:
    view = honest(shipped)
    sent = read_defense(entry).message(dict(view.gradients), torch.Generator().manual_seed(0), {})[0]
    found = {finding.name: finding.sentence for finding in recognise(dataclasses.replace(view, gradients=sent))}
    assert words in found[name]
