"""The tables of MST: rows of a training, resumption, the paper's figures beside ours, mistakes of usage."""

from __future__ import annotations

import math

import mst
import numpy as np
import pandas as pd
import pytest
from experiments.pretraining.mst_options import DEFAULT, LINES, MSTOptions
from experiments.pretraining.mst_render import (
    LAMBDAS,
    LONGER,
    MASKS,
    MST,
    ROWS,
    STRATEGIES,
    WORDS,
    accuracies,
    lines_text,
    longer_text,
    probes_text,
    trained_alike,
)
from experiments.rendering import read_rows
from experiments.scaffold import PAPER
from PIL import Image

from fedmjp.objectives import read_objective

pytestmark = pytest.mark.usefixtures("drawn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """220 pictures of two classes, noise around a light and a dark grey."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 220), ("val", 12)):
        for name, grey in (("dark", 60), ("light", 200)):
            (root / split / name).mkdir(parents=True)
            for number in range(count // 2):
                pixels = np.clip(draw.normal(grey, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def options(folder, out) -> list[str]:
    given = ["--data", f"folder:{folder}", "--train-limit", "220", "--references", "200", "--epochs", "1"]
    given += ["--objective", "mst:outputs=6,hidden=5,bottleneck=4,local_crops=1", "--warmup-epochs", "0"]
    return [*given, "--lines", "default", "mlm", "--precision", "float32", "--out", str(out)]


@pytest.mark.long
def test_rows_tables_and_resumption(folder, tmp_path, capsys) -> None:
    given = options(folder, tmp_path / "out")
    assert mst.main(given) == 0
    rows = read_rows(tmp_path / "out", ROWS)
    measures = {"knn_10", "knn_20", "knn_100", "knn_200", "linear", "linear_blocks"}
    assert {name: set(own["network"]) for name, own in rows.groupby("line")} == {
        "default": {"start", "student", "teacher"},
        "mlm": {"start", "student"},
    }
    assert all(set(own["measure"]) == measures for _, own in rows.groupby(["line", "network"]))
    assert rows["accuracy"].between(0, 100).all()
    start = rows[rows["network"] == "start"].groupby("line")["accuracy"].apply(list)
    assert start["default"] == start["mlm"]  # the same weights before training
    own = rows[rows["line"] == "default"].iloc[0]
    assert 0 < own["teacher_entropy"] <= own["collapse"] <= math.log(6) + 1e-6
    assert own["restoration"] > 0
    assert pd.isna(rows[rows["line"] == "mlm"]["distillation"]).all()
    assert (rows["images_seen"] == 192).all()
    assert Image.open(tmp_path / "out" / "attention.png").width > 600
    packed = (tmp_path / "out" / "rows.jsonl.gz").read_bytes()
    assert mst.main(given) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert mst.main([*given, "--resume"]) == 0
    assert (tmp_path / "out" / "rows.jsonl.gz").read_bytes() == packed
    text = (tmp_path / "out" / "table4.md").read_text()
    assert "| `mlm` |" in text
    assert "61.0 |" in text
    assert "Not run: `none`, `random`" in text
    for name, content in MST.files(tmp_path / "out").items():
        assert (tmp_path / "out" / name).read_text() == content


def test_every_line_is_in_a_table_and_every_figure_of_the_paper_has_a_line() -> None:
    assert {*STRATEGIES, *LAMBDAS, *MASKS, LONGER} == set(LINES) == set(WORDS)
    for table in ("mst_table3", "mst_table4", "mst_lambda", "mst_masks"):
        assert set(pd.read_csv(PAPER / f"{table}.csv")["line"]) <= set(LINES)
    found = {name: read_objective(MSTOptions().config(name, 0).objective) for name in LINES}
    assert found["mlm"].lambda_1 == 0
    assert found["mlm_dino"].lambda_1 == 1
    assert found["random"].p == found[DEFAULT].p * found[DEFAULT].share
    assert [found[name].lambda_2 for name in LAMBDAS] == [0.2, 0.4, 0.6, 0.8]
    assert {name for name in LINES if not found[name].decoder_norm} == {name for name in LINES if "no_norm" in name}
    assert MSTOptions().config(LONGER, 0).recipe.epochs == 3 * MSTOptions().config(DEFAULT, 0).recipe.epochs


def linear_probes(found: dict[str, list[float]]) -> pd.DataFrame:
    """Rows of students' linear probes, one an accuracy and seed, uncertain by 1.5 points over test images."""
    lines = ((name, seed, value) for name, values in found.items() for seed, value in enumerate(values))
    shared = dict.fromkeys(ROWS.keys) | {"network": "student", "measure": "linear", "precision": "float32"}
    return pd.DataFrame(
        shared
        | {"line": name, "seed": seed, "accuracy": value, "accuracy_low": value - 1.5, "accuracy_high": value + 1.5}
        for name, seed, value in lines
    )


def test_signs_are_judged_over_three_seeds_and_not_over_test_images() -> None:
    found = {"default": [36.0, 37.0, 38.0], "mlm": [31.0, 33.0, 34.0], "bert": [38.5, 39.0, 40.0], "none": [30.0]}
    table = accuracies(linear_probes(found | {"lambda_0.2": [20.0, 21.0]}))
    own = trained_alike(table, LINES)
    text = lines_text(own, ("default", "mlm", "bert", "none", "lambda_0.2"), "what")
    assert "-4.3 [-5.8, -2.9] (paper -12.9: agrees)" in text
    assert "+2.2 [+1.4, +2.9] (paper -0.4: contradicts)" in text
    assert "| 30.0 ± 1.5 (one seed) |" in text
    assert "| -6.0 ± 2.1 |" in text  # the paper has no such line
    assert own.loc[("lambda_0.2", "student", "linear"), "verdict"] == "cannot tell"  # two seeds
    assert own.loc[("mlm", "student", "linear"), "paper_difference"] == pytest.approx(-12.9)


def test_probes_and_longer_training_are_compared_with_the_papers() -> None:
    own = {"default": [36.0, 37.0, 38.0], "longer": [39.0, 40.2, 41.0]}
    blocks = {"default": [35.1, 36.0, 37.2], "longer": [38.0, 40.0, 42.0]}
    rows = pd.concat(
        [
            linear_probes(own),
            linear_probes(blocks).assign(measure="linear_blocks"),
            linear_probes(own).assign(measure="knn_10"),
        ]
    )
    rows["images_seen"] = rows["line"].map({"default": 100, "longer": 300})
    table = trained_alike(accuracies(rows), LINES)
    text = probes_text(table)
    assert "| 36.1 [33.5, 38.7] |  |  | 75.0 | -0.9 [-1.1, -0.7] (paper +1.1: contradicts) |" in text
    assert "| 73.9 |  |" in text
    text = longer_text(table, rows)
    assert "| 300 | linear probe of the last class token | 40.1 [37.6, 42.6] | 76.3 | +3.1 [+2.8, +3.4] (paper" in text
    assert "(paper +2.4: agrees)" in text
    assert "| 100 | 10-NN | 37.0 [34.5, 39.5] | 72.1 |  |" in text


def test_differences_do_not_mix_types_of_activations() -> None:
    """Both types have a default line; masks were trained in one of them, strategies in the other."""
    half = linear_probes({"default": [30.0], "mlm": [28.0], "bert": [31.0]}).assign(precision="bfloat16")
    full = linear_probes({"default": [40.0], "no_norm": [43.0]})
    table = accuracies(pd.concat([half, full]))
    strategies = lines_text(trained_alike(table, STRATEGIES), STRATEGIES, "what")
    assert "-2.0 ± 2.1" in strategies
    assert "Trained in bfloat16." in strategies
    masks = lines_text(trained_alike(table, ("no_norm",)), MASKS, "what")
    assert "+3.0 ± 2.1" in masks
    assert "Trained in float32." in masks


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--lines", "mask"], "--lines takes names from: default"),
        (["--references", "100"], "--references must lie between 200 and the training images"),
        (["--objective", "droppos"], "--objective is mst:option=value,..., not 'droppos'"),
        (["--objective", "mst:p=2"], "p of objective 'mst' must lie in [0, 1]"),
        (["--seeds", "1", "1"], "--seeds takes different numbers"),
    ],
)
def test_mistakes_are_one_line(given, words: str, tmp_path, capsys) -> None:
    assert mst.main([*given, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
