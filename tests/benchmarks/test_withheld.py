"""The benchmark of withheld parameters: groups, rows, resumption, mistakes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import withheld
from experiments.withheld.groups import GROUPS, without
from experiments.withheld.options import Options

from fedmjp.cli import split_commas
from fedmjp.models import build_model
from fedmjp.records.rows import load_rows
from tests.conftest import observe, photographs

SMALL = ["--models", "vit_mini_32=auto", "--num-images", "1"]
SPANNED = (
    "nothing",
    "position embedding",
    "positions and projection",
    "first query, key, value",
    "positions and first block",
)


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return withheld.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("withheld") / "out"
    assert run(out, "--budget", "5s", "--groups", *SPANNED[:-1]) == 0
    assert run(out, "--groups", SPANNED[-1], "--resume") == 0
    return out


def test_a_group_is_left_out_and_nothing_else() -> None:
    view = observe(build_model("vit_mini_32", num_classes=8, weights="random"), photographs(32, 1))
    left = {group: set(without(view, group).gradients) for group in GROUPS}
    assert left["nothing"] == set(view.gradients)
    assert left["nothing"] - left["position embedding"] == {"pos_embed"}
    gone = left["nothing"] - left["positions and projection"]
    assert gone == {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert left["nothing"] - left["first query, key, value"] == {"blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias"}
    assert len(left["nothing"] - left["first block"]) == 12
    assert left["all but the classifier"] == {"head.weight", "head.bias"}
    assert left["all but biases and classifier"] == {n for n in left["nothing"] if n.endswith("bias")} | {"head.weight"}
    assert len(left["all but norms and classifier"]) == 2 * (2 * 6 + 1) + 2


def test_the_span_takes_over_where_positions_are_withheld(finished) -> None:
    table = pd.read_csv(finished / "table.csv").set_index("withheld")
    assert list(table.index) == list(SPANNED)
    assert table.loc["nothing", "attack"] == "patch_embedding"
    for group in ("position embedding", "positions and projection"):
        assert table.loc[group, "attack"] == "token_span"
        assert table.loc[group, "answer"] == "leaks"
        assert table.loc[group, "psnr_median"] > 60
    assert table.loc["first query, key, value", "attack"] == "patch_embedding"
    assert table.loc["positions and first block", "attack"] == "later_block"


def test_resuming_a_finished_run_adds_nothing(finished) -> None:
    before = load_rows(finished / "rows.jsonl.gz")
    assert run(finished, "--budget", "5s", "--groups", *SPANNED[:-1], "--resume") == 0
    assert run(finished, "--groups", SPANNED[-1], "--resume") == 0
    assert len(load_rows(finished / "rows.jsonl.gz")) == len(before)
    assert run(finished) == 2


def test_one_group_alone_and_others_later(tmp_path) -> None:
    out, small = tmp_path / "out", ["--models", "vit_micro8_32=random", "--budget", "1s"]
    assert run(out, *small, "--groups", "position embedding") == 0
    table = pd.read_csv(out / "table.csv").set_index("withheld")
    assert list(table.index) == ["position embedding"]
    assert run(out, *small, "--groups", "all but the classifier", "--resume") == 0
    table = pd.read_csv(out / "table.csv").set_index("withheld")
    assert dict(table["answer"]) == {"position embedding": "leaks", "all but the classifier": "not tested"}


@pytest.mark.parametrize("names", [tuple(GROUPS), ("first query, key, value",), ("nothing", "first query, key, value")])
def test_a_group_is_found_by_its_name_with_commas(names: tuple[str, ...]) -> None:
    assert split_commas(Options(groups=names)).withheld() == names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "vit_mini_32"], "write MODEL=SOURCE"),
        (["--models", "vit_mini_33=auto"], "unknown model"),
        (["--models", "vit_mini_32=auto@31"], "do not divide"),
        (["--budget", "soon"], "--budget takes"),
        (["--groups", "positions"], "--groups 'positions': choose from: 'nothing', 'position embedding'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
