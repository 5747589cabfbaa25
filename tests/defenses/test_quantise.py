"""Signs, grids and half precision against loops over entries, and the size of the message."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attacks import ATTACKS
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.defenses.quantise import Quantise
from fedmjp.federation_options import FederationConfig
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.conftest import observe, photographs


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SHAPES = {"wide": (6, 40), "bias": (7,), "filters": (4, 3, 2, 2), "table": (1, 5, 8)}
ROWS = {"wide": 6, "bias": 1, "filters": 4, "table": 5}


def update(seed: int = 1) -> dict[str, torch.Tensor]:
    return {n: torch.randn(shape, generator=draw(seed + i)) for i, (n, shape) in enumerate(SHAPES.items())}


def rows_of(name: str, tensor: torch.Tensor, per: str) -> np.ndarray:
    return tensor.double().numpy().reshape(ROWS[name] if per == "row" else 1, -1)


def by_hand(row: np.ndarray, kind: str) -> list[float]:
    """Every entry by itself."""
    if kind == "sign":
        magnitude = sum(abs(v) for v in row) / len(row)
        return [magnitude if v >= 0 else -magnitude for v in row]
    largest = {"int4": 7, "int8": 127}[kind]
    grid = [k * max(abs(v) for v in row) / largest for k in range(-largest, largest + 1)]
    return [min(grid, key=lambda g, v=v: abs(g - v)) for v in row]


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("kind", ["sign", "int4", "int8"])
def test_entries_are_the_nearest_of_the_format(kind: str, per: str) -> None:
    sent = Quantise(quantise_format=kind, quantise_per=per).message(update(), draw(), {})[0]
    for name, tensor in update().items():
        found = rows_of(name, sent[name], per)
        expected = [by_hand(row, kind) for row in rows_of(name, tensor, per)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "numpy_kind"), [("float16", np.float16), ("bfloat16", None)])
def test_half_precision_is_that_of_the_format(kind: str, numpy_kind: type | None) -> None:
    sent = Quantise(quantise_format=kind).message(update(), draw(), {})[0]
    for name, tensor in update().items():
        if numpy_kind is not None:
            expected = tensor.numpy().astype(numpy_kind).astype(np.float32)
        else:  # the upper 16 bits, to nearest and ties to even
            bits = tensor.numpy().view(np.uint32).astype(np.uint64)
            expected = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
        np.testing.assert_array_equal(sent[name].numpy(), expected)


@pytest.mark.parametrize(("kind", "largest"), [("int4", 7), ("int8", 127)])
def test_stochastic_rounding_has_the_right_expectation_and_one_of_two_neighbours(kind: str, largest: int) -> None:
    defense = Quantise(quantise_format=kind, quantise_rounding="stochastic")
    given = {"w": update()["wide"]}
    step = float(given["w"].abs().max()) / largest
    sent = torch.stack([defense.message(given, draw(s), {})[0]["w"] for s in range(2000)])
    multiples = sent / step
    assert float((multiples - multiples.round()).abs().max()) < 1e-3
    assert float((sent - given["w"]).abs().max()) < 1.001 * step
    assert float((sent.mean(0) - given["w"]).abs().max()) < 5 * step / 2 / 2000**0.5
    assert float(sent.abs().max()) <= 1.0001 * float(given["w"].abs().max())


def test_zeros_stay_zeros_but_among_signs() -> None:
    given = {"w": torch.tensor([[0.0, 2.0, -4.0]]), "nothing": torch.zeros(3)}
    for kind in ("int4", "int8", "float16", "bfloat16"):
        sent = Quantise(quantise_format=kind).message(given, draw(), {})[0]
        assert float(sent["w"][0, 0]) == 0.0
        assert not sent["nothing"].any()
    sent = Quantise(quantise_format="sign").message(given, draw(), {})[0]
    assert sent["w"].tolist() == [[2.0, 2.0, -2.0]]
    assert not sent["nothing"].any()


@pytest.mark.parametrize(
    ("kind", "per", "bits"),
    [
        ("sign", "tensor", 335 + 4 * 32),
        ("sign", "row", 335 + 16 * 32),
        ("int4", "tensor", 4 * 335 + 4 * 32),
        ("int8", "row", 8 * 335 + 16 * 32),
        ("float16", "tensor", 16 * 335),
        ("bfloat16", "tensor", 16 * 335),
    ],
)
def test_the_size_of_the_message(kind: str, per: str, bits: int) -> None:
    defense = Quantise(quantise_format=kind, quantise_per=per)
    assert defense.bits(defense.message(update(), draw(), {})[0]) == bits


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_a_client_sends_the_decoded_update(kind: str) -> None:
    """Also where it returns weights: their difference from those that it was sent is what was rounded."""
    config = RunConfig(
        defense=("quantise:quantise_format=int4",),
        federation=FederationConfig(clients=2, rounds=1, update=kind, learning_rate=0.1),
        model=ModelConfig("vit_micro8_32", "random"),
        data=DataConfig(train_limit=8, test_limit=2),
    )
    tasks = [ClientTask(config, entry) for entry in ("none", *config.defense)]
    weights = {n: p.detach().clone() for n, p in tasks[0].parameters.items()}
    plain, sent = (task.update(0, 1, weights).tensors for task in tasks)
    for name, weight in weights.items():
        whole, found = (t[name] if kind == "gradient" else weight - t[name] for t in (plain, sent))
        expected = torch.tensor(by_hand(whole.double().flatten().numpy(), "int4")).view_as(whole)
        slack = 1e-5 * float(whole.abs().max()) + (4e-7 * float(weight.abs().max()) if kind == "weights" else 0.0)
        assert float((found - expected).abs().max()) <= slack + 1e-12


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"quantise_format": "bfloat16"}, 35.0),
        ({"quantise_per": "row", "quantise_rounding": "stochastic"}, 25.0),
        ({"quantise_format": "int4", "quantise_per": "row"}, 14.0),
        ({"quantise_format": "sign"}, 0.0),
    ],
)
def test_a_photograph_that_is_sent_in_few_bits(options: dict, least: float) -> None:
    """What the attack that reads the rounding recovers of it, and that it vouches for nothing wrong."""
    image = photographs(64, 1)
    view = observe(build_model("vit_mini_64", num_classes=200, weights="auto"), image)
    read = {n: view.gradients[n] for n in ("pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")}
    sent = Quantise(**options).message(read, draw(), {})[0]
    found = ATTACKS.get("patch_embedding")()([dataclasses.replace(view, gradients=sent)])
    assert float(psnr(found.images, image)) > least
    wrong = torch.nn.functional.avg_pool2d((found.images - image).square().mean(dim=1, keepdim=True), 8) > 10**-2.5
    known = found.known[..., ::8, ::8]
    assert int((known & wrong).sum()) <= 0.02 * known.numel()
    assert bool(known.any()) or least < 20
