"""The tables of MST: rows of a training, resumption, the paper's figures beside ours, mistakes of usage."""

from __future__ import annotations

import math

import mst
import numpy as np
import pandas as pd
import pytest
from experiments.pretraining.mst_options import DEFAULT, LINES, MSTOptions
from experiments.pretraining.mst_render import LAMBDAS, MST, ROWS, STRATEGIES, WORDS, lines_text
from experiments.rendering import read_rows
from experiments.scaffold import PAPER
from PIL import Image

from fedmjp.objectives import read_objective


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


def test_rows_tables_and_resumption(folder, tmp_path, capsys) -> None:
    given = options(folder, tmp_path / "out")
    assert mst.main(given) == 0
    rows = read_rows(tmp_path / "out", ROWS)
    measures = {"knn_10", "knn_20", "knn_100", "knn_200", "linear"}
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
    assert set(STRATEGIES) | set(LAMBDAS) == set(LINES) == set(WORDS)
    for table in ("mst_table4", "mst_lambda"):
        assert set(pd.read_csv(PAPER / f"{table}.csv")["line"]) <= set(LINES)
    found = {name: read_objective(MSTOptions().config(name, 0).objective) for name in LINES}
    assert found["mlm"].lambda_1 == 0
    assert found["mlm_dino"].lambda_1 == 1
    assert found["random"].p == found[DEFAULT].p * found[DEFAULT].share
    assert [found[name].lambda_2 for name in LAMBDAS] == [0.2, 0.4, 0.6, 0.8]


def test_a_difference_is_held_against_the_papers_sign() -> None:
    """Half widths of 1.5 and 2 points make 2.5 of the difference."""
    keys = pd.MultiIndex.from_product([["default", "mlm", "bert", "none"], ["student", "start"], ["linear", "knn_20"]])
    own = pd.DataFrame({"accuracy_mean": 36.0, "accuracy_low": 34.5, "accuracy_high": 37.5}, index=keys)
    own.loc["mlm"] = [32.0, 30.0, 34.0]
    own.loc["bert"] = [39.0, 37.0, 41.0]
    own.loc["none"] = [34.0, 32.0, 36.0]
    paper = {"default": 73.9, "mlm": 61.0, "bert": 73.5, "none": 70.0}
    text = lines_text(own, pd.DataFrame(), tuple(paper), "what", paper)
    assert "-4.0 [-6.5, -1.5] (-12.9: agrees)" in text
    assert "+3.0 [+0.5, +5.5] (-0.4: contradicts)" in text
    assert "-2.0 [-4.5, +0.5] (-3.9: cannot tell)" in text


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
