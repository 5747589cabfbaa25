"""The benchmark of messages of low precision: what is sent, rows, resumption, mistakes."""

from __future__ import annotations

from pathlib import Path

import message_precision
import pandas as pd
import pytest
import torch
from experiments.message_precision.options import FEEDBACK, PRECISIONS
from experiments.message_precision.precisions import send

from attacks.linear.intervals import error_bounds
from fedmjp.models import build_model
from fedmjp.records.rows import load_rows
from tests.conftest import observe, photographs

SMALL = ["--model", "vit_mini_32", "--num-images", "2", "--precisions", "bfloat16", "weight decay"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return message_precision.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


# Of messages of these kinds the bounds are sqrt(3) deviations, and no limits.
UNLIMITED = ("stochastic", "signs", "random")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_message_is_within_the_bounds_that_it_shows(precision: str) -> None:
    view = observe(build_model("vit_mini_32", num_classes=8, weights="auto"), photographs(32, 1))
    (sent,) = send([view], precision, rate=1e-3, decay=0.05, seed=0)
    name = "patch_embed.proj.weight"
    error = (sent.gradients[name] - view.gradients[name]).double().abs()
    if precision == "weight decay":
        added = 0.05 * dict(view.model.named_parameters())[name].detach()
        torch.testing.assert_close(sent.gradients[name], view.gradients[name] + added)
    elif any(kind in precision for kind in UNLIMITED):
        assert float(error.square().sum()) < 1.5 * float(error_bounds(sent, name).square().sum()) / 3
    else:
        assert bool((error <= 1.01 * error_bounds(sent, name) + 1e-6 * sent.gradients[name].abs()).all())
    assert (float(error.max()) > 0) == (precision != "float32")


def test_a_memory_is_carried_from_one_message_to_the_next() -> None:
    view = observe(build_model("vit_mini_32", num_classes=8, weights="auto"), photographs(32, 1))
    name = "patch_embed.proj.weight"
    with_memory, without = (
        [view.gradients[name] for view in send([view] * 3, f"largest 10 %{kind}", rate=1e-3, decay=0.05, seed=0)]
        for kind in (FEEDBACK, "")
    )
    assert torch.equal(with_memory[0], without[0])
    assert torch.equal(without[1], without[0])
    assert int((with_memory[1] != 0).logical_and(with_memory[0] == 0).sum()) > 500


@pytest.mark.long
def test_known_errors_come_near_the_bound_in_float16_and_no_plain_solve_does(tmp_path) -> None:
    options = ["--attacks", "patch_embedding", "--bounds", "--precisions", "float16", "--num-images", "1"]
    assert run(tmp_path / "out", *options) == 0
    values = pd.read_csv(tmp_path / "out" / "table.csv").set_index("way")["psnr_median"]
    assert abs(values["errors known"] - values["bound"]) < 1.5
    assert values["plain"] < values["bound"] - 3
    assert run(tmp_path / "large", *options, "--model", "vit_mini_64") == 2


@pytest.mark.long
def test_of_a_tenth_of_the_entries_no_estimate_says_much_unless_it_knows_photographs(tmp_path) -> None:
    options = ["--attacks", "patch_embedding", "--bounds", "--precisions", "largest 10 %", "--num-images", "1"]
    assert run(tmp_path / "out", *options) == 0
    values = pd.read_csv(tmp_path / "out" / "table.csv").set_index("way")["psnr_median"]
    assert values["bound"] < 0 < values["bound of normal pixels"]
    assert abs(values["errors known"] - values["bound of normal pixels"]) < 3


def test_known_errors_gain_and_a_finished_run_is_not_repeated(tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--attacks", "patch_embedding") == 0
    table = pd.read_csv(out / "table.csv").set_index(["message", "way"])
    assert table.loc[("bfloat16", "errors known"), "difference_median"] > 1
    assert table.loc[("weight decay", "errors known"), "psnr_median"] > 80
    assert table.loc[("weight decay", "plain"), "psnr_median"] < 40
    before = load_rows(out / "rows.jsonl.gz")
    assert run(out, "--attacks", "patch_embedding", "--resume") == 0
    assert len(load_rows(out / "rows.jsonl.gz")) == len(before)
    assert run(out) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--precisions", "int4"], "'int4' is none of"),
        (["--sparse-updates", "0"], "sparse-updates"),
        (["--attacks", "april"], "'april' is none of"),
        (["--gamma", "1"], "--gamma must lie"),
        (["--rate", "0"], "must be positive"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
