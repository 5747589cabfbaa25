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
# Top-1 accuracy of weights of a longer training, in percent.
LEAST = {
    f"vit_mini_{size}{variant}": least for size, least in ((32, 75), (64, 25)) for variant in ("", "_mjp", "_nope")
}
FILES = sorted(path.name.removesuffix(".safetensors") for path in SHIPPED.glob("*.safetensors"))


def card_of(file: str) -> str:
    return (SHIPPED / f"{file}.md").read_text(encoding="utf-8")


def arguments_of(file: str) -> dict[str, str]:
    """Name and weights that `build_model` takes, of a file NAME[.WEIGHTS]."""
    name, _, weights = file.partition(".")
    return {"name": name, "weights": weights or "auto"}


def test_the_minis_ship_in_all_variants() -> None:
    minis = {f"vit_mini_{size}{variant}" for size in (32, 64) for variant in ("", "_mjp", "_nope")}
    assert minis <= set(shipped_names()) <= set(model_names())


@pytest.mark.parametrize("file", FILES)
def test_files(file: str) -> None:
    path = SHIPPED / f"{file}.safetensors"
    assert path.stat().st_size <= LARGEST
    assert {t.dtype for t in load_file(path).values()} == {torch.float16}
    card = card_of(file)
    assert card.startswith(f"# {arguments_of(file)['name']}, ")
    for word in ("accuracy", "images seen", "recipe", "licence", "-dirty"):
        assert (word in card) == (word != "-dirty"), word


@pytest.mark.parametrize("name", shipped_names("long"))
def test_a_longer_training_has_learned_more(name: str) -> None:
    """Than three epochs of CIFAR-10, which reach 52 %, or six of Tiny-ImageNet, which reach 12 %."""
    longer, shorter = (float(re.search(r"of this file \| ([\d.]+)%", card_of(f))[1]) for f in (f"{name}.long", name))
    assert longer >= LEAST[name]
    assert shorter < longer - 10


@pytest.mark.parametrize("file", FILES)
def test_they_are_found_by_name(file: str) -> None:
    source = arguments_of(file)
    dal = "nonlinear" if source["name"].endswith("_mjp") else "none"
    built = build_model(**source, num_classes=classes_of(source["name"], source["weights"]), dal=dal)
    assert built.provenance == f"shipped {file}.safetensors"
    stored = load_file(SHIPPED / f"{file}.safetensors")
    for key, value in built.module.state_dict().items():
        assert torch.equal(value, stored[key].float()), key


def test_other_classes_leave_the_head_random() -> None:
    assert build_model("vit_mini_64", num_classes=7).provenance == "shipped vit_mini_64.safetensors (head random)"


@pytest.mark.parametrize("file", FILES)
def test_accuracy_is_that_of_the_card(file: str) -> None:
    """On every twentieth test image of the data in the card, to four standard errors of a sample of that size."""
    data = re.match(r"# \S+, (\S+)", card_of(file))[1]
    accuracy, count = re.search(r"of this file \| ([\d.]+)% of (\d+) test images", card_of(file)).groups()
    source = arguments_of(file)
    built = build_model(**source, num_classes=classes_of(source["name"], source["weights"]))
    test = load_data(data, size=built.image_size, path=Path(shared_file(f"data/{data}"))).test
    assert len(test) == int(count)
    sample = test.subset(range(0, len(test), 20))
    expected = float(accuracy) / 100
    error = (expected * (1 - expected) / len(sample)) ** 0.5
    assert evaluate(built, sample, torch.device("cpu"))[1] == pytest.approx(expected, abs=4 * error)


def test_weights_of_a_longer_training_are_the_small_models_alone() -> None:
    words = "no weights 'long' of vit_ti_mjp ship; pass --weights auto, or choose from: vit_mini_32, vit_mini_32_mjp"
    with pytest.raises(UsageError, match=words):
        build_model("vit_ti_mjp", num_classes=200, weights="long")


def test_a_copy_without_its_weights_is_refused(tmp_path, monkeypatch) -> None:
    """Flower's bundles drop .safetensors and keep the cards: the model would run untrained."""
    (tmp_path / "vit_mini_32.md").write_text(card_of("vit_mini_32"))
    monkeypatch.setattr(weights, "SHIPPED", tmp_path)
    with pytest.raises(UsageError, match=r"this copy of FedMJP lacks the weights of vit_mini_32.*--weights random"):
        build_model("vit_mini_32", num_classes=8)
    assert "NOT TRAINED" in build_model("vit_micro_32", num_classes=8).provenance
