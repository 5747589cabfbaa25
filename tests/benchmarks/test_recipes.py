"""The table of clients' recipes as a user meets it: a run, one recipe more, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import recipes
from experiments.client_recipes import RECIPES
from experiments.recipes.options import Options

SMALL = ["--model", "vit_mini_32", "--data", "photos", "--images", "8", "--clients", "2", "--rounds", "1"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    return recipes.main([*SMALL, "--threads", "1", "--defenses", "none", "--out", str(out), *options])


@pytest.mark.long
def test_recipes_add_up_to_one_table(tmp_path) -> None:
    assert run(tmp_path, "--recipes", "weight decay 0.05") == 0
    assert run(tmp_path, "--recipes", "flip", "2 local steps", "--resume") == 0
    table = pd.read_csv(tmp_path / "table.csv").set_index("recipe")
    assert list(table.index) == [name for name in RECIPES if name in ("flip", "weight decay 0.05", "2 local steps")]
    assert list(table["answer"]) == ["leaks", "leaks", "partly"]
    assert (table["count"] == 2).all()
    found = pd.read_csv(tmp_path / "attacks.csv").set_index(["recipe", "attack"])
    assert found.loc[("flip", "patch_embedding"), "above_25"] == table.loc["flip", "recovered"] == 2
    assert found.loc[("2 local steps", "patch_embedding"), ["above_25", "count"]].tolist() == [0, 2]
    assert found.loc[("flip", "mean_image"), "psnr_median"] < 25
    described = json.loads((tmp_path / "run.json").read_text())
    assert sorted(described["recipes"].values()) == sorted(table.index)
    assert "mjp_subspace" in described["not_run"]


def test_the_common_recipe_is_every_axis_at_once() -> None:
    config = Options().federation("common")
    config.validate()
    assert (config.local.optimizer, config.local.augment, config.federation.local_epochs) == ("adamw", "crop+flip", 2)
    assert (config.federation.batch_size, config.federation.update) == (32, "weights")


def test_mistakes_are_one_line(tmp_path, capsys) -> None:
    for options, words in (
        (["--recipes", "sgd"], "--recipes 'sgd' is unknown"),
        (["--images", "0"], "--images must be"),
    ):
        assert run(tmp_path / "out", *options) == 2
        printed = capsys.readouterr().err.strip()
        assert words in printed
        assert printed.count("\n") == 0
    assert not (tmp_path / "out").exists()
