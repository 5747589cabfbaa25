"""Checkpoints included in the package: they are found by `--weights auto`, and their cards are correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attacks import UsageError
from fedmjp.data import load_data
from fedmjp.evaluation.accuracy import evaluate
from fedmjp.models import build_model, model_names, weights
from fedmjp.models.weights import SHIPPED, classes_of, shipped_names
from tests.conftest import shared_file

LARGEST = 8_000_000  # bytes


def card_of(name: str) -> str:
    return (SHIPPED / f"{name}.md").read_text(encoding="utf-8")


def test_the_minis_ship_in_all_variants() -> None:
    minis = {f"vit_mini_{size}{variant}" for size in (32, 64) for variant in ("", "_mjp", "_nope")}
    assert minis <= set(shipped_names()) <= set(model_names())


@pytest.mark.parametrize("name", shipped_names())
def test_files(name: str) -> None:
    path = SHIPPED / f"{name}.safetensors"
    assert path.stat().st_size <= LARGEST
    assert {t.dtype for t in load_file(path).values()} == {torch.float16}
    card = card_of(name)
    assert card.startswith(f"# {name}, ")
    for word in ("accuracy", "images seen", "recipe", "licence", "-dirty"):
        assert (word in card) == (word != "-dirty"), word


@pytest.mark.parametrize("name", shipped_names())
def test_auto_finds_them(name: str) -> None:
    dal = "nonlinear" if name.endswith("_mjp") else "none"
    built = build_model(name, num_classes=classes_of(name, "auto"), dal=dal)
    assert built.provenance == f"shipped {name}.safetensors"
    stored = load_file(SHIPPED / f"{name}.safetensors")
    for key, value in built.module.state_dict().items():
        assert torch.equal(value, stored[key].float()), key


def test_other_classes_leave_the_head_random() -> None:
    assert build_model("vit_mini_64", num_classes=7).provenance == "shipped vit_mini_64.safetensors (head random)"


@pytest.mark.parametrize("name", shipped_names())
def test_accuracy_is_that_of_the_card(name: str) -> None:
    """On every twentieth test image of the data in the card, to four standard errors of a sample of that size."""
    data = re.match(r"# \S+, (\S+)", card_of(name))[1]
    accuracy, count = re.search(r"of this file \| ([\d.]+)% of (\d+) test images", card_of(name)).groups()
    built = build_model(name, num_classes=classes_of(name, "auto"))
    test = load_data(data, size=built.image_size, path=Path(shared_file(f"data/{data}"))).test
    assert len(test) == int(count)
    sample = test.subset(range(0, len(test), 20))
    expected = float(accuracy) / 100
    error = (expected * (1 - expected) / len(sample)) ** 0.5
    assert evaluate(built, sample, torch.device("cpu"))[1] == pytest.approx(expected, abs=4 * error)


def test_a_copy_without_its_weights_is_refused(tmp_path, monkeypatch) -> None:
    """Flower's bundles drop .safetensors and keep the cards: the model would run untrained."""
    (tmp_path / "vit_mini_32.md").write_text(card_of("vit_mini_32"))
    monkeypatch.setattr(weights, "SHIPPED", tmp_path)
    with pytest.raises(UsageError, match=r"this copy of FedMJP lacks the weights of vit_mini_32.*--weights random"):
        build_model("vit_mini_32", num_classes=8)
    assert "NOT TRAINED" in build_model("vit_micro_32", num_classes=8).provenance
