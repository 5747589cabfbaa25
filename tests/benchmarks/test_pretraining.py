"""benchmarks/droppos.py: its rows, its tables beside the paper's, resuming, and the figures copied from the paper."""

from __future__ import annotations

import pandas as pd
import pytest
from experiments.pretraining.options import GAMMAS, GAMMAS_POS, TRAININGS, DropPosOptions
from experiments.pretraining.render import averages, cells, table_text
from experiments.pretraining.rows import ROWS
from experiments.rendering import read_rows
from experiments.scaffold import PAPER, command

from fedmjp.objectives import read_objective

main = command("droppos", DropPosOptions, "experiments.pretraining.protocol")
SMALL = ["--data", "photos", "--train-limit", "16", "--test-limit", "4", "--model", "vit_micro_32", "--threads", "1"]
SMALL += ["--decoder-width", "32", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "8"]


def test_the_papers_cells_give_the_averages_that_it_prints_but_for_the_default() -> None:
    paper = pd.read_csv(PAPER / "droppos_tables.csv")
    assert set(paper["line"]) == set(TRAININGS)
    assert (paper.groupby("line").size() == len(GAMMAS) * len(GAMMAS_POS)).all()
    means = paper.groupby("line")["places"].mean()
    printed = pd.read_csv(PAPER / "droppos_averages.csv").set_index("line")["printed_places"]
    differing = (means - printed).abs().round(3)
    assert differing[differing > 0.007].to_dict() == {"default": 0.67}


def test_trainings_are_13_different_ones_and_named_by_their_options() -> None:
    options = DropPosOptions()
    chosen = options.chosen()
    assert len(set(chosen.values())) == 13
    for name, objective in chosen.items():
        assert read_objective(options.config(name, 0).objective) == objective


def test_rows_resume_and_tables(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main([*SMALL, *out, "--only", "tau_inf"]) == 0
    before = read_rows(tmp_path / "out", ROWS)
    assert len(before) == 16
    assert main([*SMALL, *out, "--only", "tau_inf", "gamma_pos_1", "--resume"]) == 0
    rows = read_rows(tmp_path / "out", ROWS)
    assert len(rows) == 32
    pd.testing.assert_frame_equal(rows[:16], before)
    assert rows[rows["gamma"] == 0.75]["seen"].eq(16).all()
    hidden = rows[(rows["line"] == "tau_inf") & (rows["gamma"] == 0.75)].set_index("gamma_pos")["hidden"]
    assert hidden.to_dict() == {0.25: 4, 0.5: 8, 0.75: 12, 0.95: 16}
    found = cells(rows).set_index(["line", "gamma", "gamma_pos"])
    assert found.loc[("gamma_pos_1", 0.5, 0.95), "paper_places"] == 45.01
    table = averages(rows).set_index("line")
    mean = rows[rows["line"] == "gamma_pos_1"]["accuracy"].mean()
    assert table.loc["gamma_pos_1", "places_mean"] == pytest.approx(mean)
    assert table.loc["gamma_pos_1", "verdict"] == "cannot tell"  # one seed
    assert (tmp_path / "out" / "table.md").read_text() == table_text(rows)
    assert "each training saw 16 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "gamma_2"], "unknown training 'gamma_2'"),
        (["--seeds", "1", "1"], "--seeds takes different numbers"),
        (["--decoder-width", "40"], "multiple of 32"),
        (["--model", "resnet50"], "needs a plain ViT"),
    ],
)
def test_errors_are_one_line(options, words: str, capsys) -> None:
    assert main([*SMALL, *options]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
