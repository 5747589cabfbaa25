"""Trainings side by side: what the table takes from their folders, and folders that hold none."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import training_curves as command
from rich.console import Console

from fedmjp.config import DataConfig, ModelConfig
from fedmjp.report.columns import TEXT
from fedmjp.training import Recipe, TrainConfig, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One epoch of two steps."""
    recipe = Recipe(epochs=1, batch_size=8, warmup_epochs=0, rand_augment="none")
    data = DataConfig(data="photos", train_limit=16, test_limit=8)
    out = tmp_path_factory.mktemp("training") / "mjp"
    model = ModelConfig("vit_mini_32", "random")
    train(TrainConfig(defense="mjp", model=model, data=data, recipe=recipe, out=out), Console(quiet=True))
    return out


def test_table_and_curves(folder, tmp_path) -> None:
    assert command.main([str(folder), "--out", str(tmp_path / "out")]) == 0
    line = pd.read_csv(tmp_path / "out" / "table.csv", dtype=TEXT).iloc[0]
    assert (line["model"], line["gamma"], line["images_seen"]) == ("vit_mini_32_mjp", 0.9, 16)
    history = pd.read_csv(folder / "history.csv")
    assert line["accuracy"] == pytest.approx(100 * history["test_accuracy"].iloc[-1])
    assert (tmp_path / "out" / "curves_photos.png").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["commits"] == [line["commit"]]


def test_folders_without_a_finished_training(folder, tmp_path, capsys) -> None:
    assert command.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "holds no training" in capsys.readouterr().err
    assert command.main([str(folder), str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "two trainings of one model" in capsys.readouterr().err
    described = json.loads((folder / "run.json").read_text())
    described["config"]["recipe"]["epochs"] = 2
    (tmp_path / "run.json").write_text(json.dumps(described))
    (tmp_path / "history.csv").write_text((folder / "history.csv").read_text())
    assert command.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "finish it with --resume" in capsys.readouterr().err
