"""python -m fedmjp.probe: measures of an encoder from its file alone, and one-line errors."""

from __future__ import annotations

import re

import pytest
import torch

from fedmjp import probe as command
from fedmjp.config import DataConfig, ModelConfig
from fedmjp.evaluation.linear_probe import probe_accuracy
from fedmjp.evaluation.positions import position_accuracy
from fedmjp.objectives.learner import restore
from fedmjp.training import Recipe, TrainConfig, train
from fedmjp.training.trainer import Trainer
from tests.training.test_train import QUIET

DATA = DataConfig(data="photos", train_limit=40, test_limit=10)
RECIPE = Recipe(
    epochs=1, batch_size=8, warmup_epochs=0, mixup=0, cutmix=0, label_smoothing=0, erasing=0, rand_augment="none"
)
MORE = ["--data", "photos", "--train-limit", "40", "--test-limit", "10", "--neighbours", "1", "5"]


@pytest.mark.parametrize(
    ("objective", "defense", "pool"),
    [
        ("mp3:eta=0.5", "none", "mean"),
        ("droppos:decoder_width=32", "none", "mean"),
        ("supervised", "none", "class"),
        ("supervised", "mjp", "class"),
    ],
)
def test_measures_are_those_of_the_trained_model(objective: str, defense: str, pool: str, tmp_path, capsys) -> None:
    model = ModelConfig("vit_micro_32", "random")
    config = TrainConfig(
        objective=objective, defense=defense, model=model, data=DATA, recipe=RECIPE, out=tmp_path / "out"
    )
    path = train(config, QUIET)
    assert command.main(["--checkpoint", str(path), *MORE]) == 0
    printed = dict(re.findall(r"^(.+): ([\d.]+)%$", capsys.readouterr().out, re.MULTILINE))
    learner, data, device = restore(path, torch.device("cpu")), Trainer(config).data, torch.device("cpu")
    expected = {"linear probe": probe_accuracy(learner.model, data, device, pool)}
    if objective != "supervised":
        expected["places of patches"] = position_accuracy(learner.objective, learner.model, data.test, device)[1]
    assert set(printed) == {"1 nearest neighbours", "5 nearest neighbours", *expected}
    for name, value in expected.items():
        assert float(printed[name]) == pytest.approx(100 * value, abs=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no checkpoint at None; pass --checkpoint"),
        (["--checkpoint", "nowhere.safetensors"], "no checkpoint at nowhere.safetensors"),
        (["--checkpoint", __file__], "is not a readable checkpoint"),
        (["--checkpoint", __file__, "--neighbours", "0"], "--neighbours takes numbers of at least 1, not 0"),
    ],
)
def test_errors_are_one_line(options, words: str, capsys) -> None:
    assert command.main(options) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
