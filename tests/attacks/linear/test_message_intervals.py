"""The precision of a message is read from its values, and every entry is within the bounds that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacks.linear.grids import signs_of
from attacks.linear.intervals import (
    COARSE,
    Message,
    bounds_of,
    coarseness,
    error_bounds,
    format_of,
    largest_share_of_same_image,
    read_message,
    relative_deviation,
)
from fedmjp.defenses.chain import read_defense
from tests.conftest import observe, photographs

NAMES = ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "blocks.0.attn.qkv.weight")


def on_grid(rows: Tensor, low: Tensor | float, step: Tensor) -> Tensor:
    return ((rows - low) / step).round() * step + low


def symmetric(gradient: Tensor) -> Tensor:
    return on_grid(gradient, 0.0, gradient.abs().max() / 127)


def affine(gradient: Tensor) -> Tensor:
    return on_grid(gradient, gradient.min(), (gradient.max() - gradient.min()) / 255)


def channels(gradient: Tensor) -> Tensor:
    rows = gradient.flatten(1) if len(gradient) > 1 and gradient.dim() > 1 else gradient.reshape(1, -1)
    return on_grid(rows, 0.0, rows.abs().amax(dim=1, keepdim=True) / 127).reshape(gradient.shape)


def largest_tenth(gradient: Tensor) -> Tensor:
    least = gradient.abs().flatten().kthvalue(round(0.9 * gradient.numel())).values
    return torch.where(gradient.abs() > least, gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("change", "deviation"),
    [
        (lambda g: g.half().float(), 2e-4),
        (lambda g: 1024 * g.half().float(), 2e-4),
        (lambda g: (1024 * g).half().float() / 1024, 2e-4),
        (lambda g: g.bfloat16(), 1.7e-3),
        (lambda g: g.bfloat16().float(), 1.7e-3),
        (symmetric, 1e-2),
        (affine, 1e-2),
        (channels, 5e-3),
        (largest_tenth, 0.5),
        (lambda g: largest_tenth(g).bfloat16().float(), 0.5),
    ],
)
def test_every_error_is_within_its_bound(mini, change: Callable[[Tensor], Tensor], deviation: float) -> None:
    view = observe(mini, photographs(64, 1))
    factor = float(change(view.gradients["pos_embed"]).abs().max() / view.gradients["pos_embed"].abs().max())
    factor = 1024.0 if factor > 512 else 1.0
    for name in NAMES:
        true = view.gradients[name]
        sent = change(true)
        bounds = bounds_of(sent)
        error = (sent.double() - factor * true.double()).abs()
        assert bool((error <= 1.001 * bounds + 1e-6 * sent.abs()).all())
        found = relative_deviation(sent, bounds)
        true_rms = float(error.square().mean().sqrt() / sent.double().square().mean().sqrt())
        assert 0.3 * found < true_rms < 1.6 * found
    found = relative_deviation(change(view.gradients[NAMES[1]]), bounds_of(change(view.gradients[NAMES[1]])))
    assert deviation / 3 < found < 3 * deviation


def test_float32_is_not_coarse(mini) -> None:
    view = observe(mini, photographs(64, 1))
    assert coarseness(view, NAMES) < COARSE
    assert {format_of(view, name) for name in NAMES} == {torch.float32}
    half = dataclasses.replace(view, gradients={n: g.bfloat16().float() for n, g in view.gradients.items()})
    assert {format_of(half, name) for name in NAMES} == {torch.bfloat16}
    assert coarseness(half, NAMES) > COARSE


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_returned_weights_have_the_spacing_of_weights(mini, kind: torch.dtype) -> None:
    view, rate = observe(mini, photographs(64, 1)), 1e-3
    weights = {n: p.detach() for n, p in view.model.named_parameters()}
    returned = {n: (weights[n] - rate * g).to(kind).float() for n, g in view.gradients.items()}
    sent = {n: (weights[n] - w) / rate for n, w in returned.items()}
    update = dataclasses.replace(view, gradients=sent, kind="weights", learning_rate=rate)
    for name in NAMES:
        error, bounds = (sent[name] - view.gradients[name]).double().abs(), error_bounds(update, name)
        assert bool((error <= 1.01 * bounds + 1e-6 * sent[name].abs()).all())
        assert float(error.square().mean().sqrt()) > 0.3 * float(bounds.square().mean().sqrt())


def test_the_share_of_the_same_image_follows_the_noise_of_the_message() -> None:
    shares = [largest_share_of_same_image(own) for own in (1e-7, 1e-4, 1e-3, 5e-3, 0.1)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx((1e-7 * 3e-3) ** 0.5)  # float32: as before
    assert all(share > 2.1 * own for share, own in zip(shares[2:4], (1e-3, 5e-3), strict=True))
    assert shares[-1] < 0.05  # what another photograph leaves


def decoded(view, entry: str, seed: int = 0) -> dict[str, Tensor]:
    return read_defense(entry).message(dict(view.gradients), torch.Generator().manual_seed(seed), {})[0]


ROW = "quantise_per=row"
MESSAGES = [
    ("quantise", Message()),
    (f"quantise:{ROW}", Message()),
    (f"quantise:{ROW},quantise_rounding=stochastic", Message(whole_steps=True)),
    ("quantise:quantise_rounding=stochastic", Message(whole_steps=True)),
    (f"quantise:quantise_format=int4,{ROW}", Message()),
    (f"quantise:quantise_format=int4,{ROW},quantise_rounding=stochastic", Message(whole_steps=True)),
    ("quantise:quantise_format=sign", Message()),
    (f"quantise:quantise_format=sign,{ROW}", Message()),
    ("topk:topk_share=0.3", Message("largest")),
    ("topk:topk_share=0.9", Message("largest")),
    ("topk:topk_share=0.3,topk_over=update", Message("largest")),
    ("topk:topk_share=0.3,topk_choice=random", Message("random")),
    ("topk:topk_share=0.03,topk_choice=random", Message("random")),
]


LOOSE = ("quantise", "topk:topk_share=0.3,topk_over=update", f"quantise:quantise_format=sign,{ROW}")


@pytest.mark.parametrize("kind", ["gradient", "weights"])
@pytest.mark.parametrize(("entry", "expected"), MESSAGES)
def test_the_deviation_of_every_message_is_read_from_it(mini, entry: str, expected: Message, kind: str) -> None:
    """Whatever clients do to an update: the errors that it shows are those that it has, also in returned weights.

    Rounding to nearest counts as rounding at random where the rows are small for the grid, and the smallest entry that
    was sent of a tensor may be far above the limit of the whole update: bounds too wide, which is the safe side. Signs
    of the whole position table do not show that the class token's row is larger than the others.
    """
    view = observe(mini, photographs(64, 1))
    sent = decoded(view, entry)
    update = dataclasses.replace(view, gradients=sent)
    if kind == "weights":
        weights, rate = {n: p.detach() for n, p in view.model.named_parameters()}, 0.1
        sent = {n: (weights[n] - (weights[n] - rate * g)) / rate for n, g in sent.items()}
        update = dataclasses.replace(view, gradients=sent, kind="weights", learning_rate=rate)
    message = read_message(update)
    assert (
        message.chosen == expected.chosen if entry.startswith("topk") else message.whole_steps >= expected.whole_steps
    )
    for name in NAMES[1:2] if entry.endswith("=sign") else NAMES[:2]:
        error = (sent[name] - view.gradients[name]).double()
        true, bounds = float(error.square().mean().sqrt()), error_bounds(update, name)
        found = float(bounds.square().mean().sqrt()) / 3**0.5
        assert 0.7 * true < found < (7 if entry in LOOSE else 1.7) * true, name


def test_rounding_to_nearest_is_told_from_rounding_at_random(mini) -> None:
    view = observe(mini, photographs(64, 1))
    found = [
        read_message(
            dataclasses.replace(view, gradients=decoded(view, f"quantise:{ROW},quantise_rounding={way}", seed))
        )
        for way, seed in (("nearest", 0), ("stochastic", 0), ("stochastic", 1))
    ]
    assert [message.whole_steps for message in found] == [False, True, True]


def test_what_is_left_out_of_a_grid_is_unknown_up_to_the_smallest_that_was_sent(mini) -> None:
    view = observe(mini, photographs(64, 1))
    update = dataclasses.replace(view, gradients=decoded(view, "topk:topk_share=0.3+quantise"))
    for name in NAMES[:2]:
        error = (update.gradients[name] - view.gradients[name]).double().abs()
        assert float((error <= 1.01 * error_bounds(update, name)).double().mean()) > 0.99


@pytest.mark.parametrize("hidden", [0, 10])
def test_one_magnitude_is_read_beside_errors_that_hide_it_in_the_first_channels(hidden: int) -> None:
    generator, errors = torch.Generator().manual_seed(0), torch.full((64, 48), 0.05, dtype=torch.float64)
    drawn, noise = torch.randn((2, 64, 48), generator=generator, dtype=torch.float64)
    sizes = torch.where(torch.arange(64)[:, None] < hidden, 1e-3, 1.0).double()
    found = signs_of(sizes * drawn.sign() + noise.clamp(-1, 1) * errors, errors)
    assert found.shape == ((64, 1) if hidden else (1, 1))
    torch.testing.assert_close(found.expand(64, 1), sizes, atol=0.05, rtol=0)
    assert signs_of(drawn, errors) is None
