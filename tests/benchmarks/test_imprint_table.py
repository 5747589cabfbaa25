"""The benchmark of bins and traps: what each attack is granted, what is counted, clients with layers of their own."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import imprint
import pandas as pd
import pytest
from experiments.imprint.render import imprint_block, imprint_files, passive_block

from fedmjp.records.rows import load_rows

SMALL = ["--model", "vit_micro_32", "--clients", "1", "--threads", "1"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return imprint.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("imprint") / "out"
    assert run(out, "--batch-sizes", "8", "--attack-options", "imprint.calibrated=true") == 0
    traps = ["--cases", "adapter_trap=mixed", "--batch-sizes", "1", "--defense", "adapters", "--rounds", "2"]
    assert run(out, "--resume", *traps) == 0
    return out


def test_images_come_back_under_what_the_attack_uses_and_no_more(finished) -> None:
    table = pd.read_csv(finished / "table.csv").set_index("attack")
    assert table.loc["imprint calibrated", "above_30"] >= table.loc["imprint calibrated", "whole"] >= 4
    assert table.loc["imprint calibrated", "psnr_whole"] > 60
    assert table.loc["adapter_trap", "whole"] == table.loc["adapter_trap", "count"] == 1
    assert table.loc["adapter_trap", "rounds"] == 2
    grants = load_rows(finished / "rows.jsonl.gz").groupby("attack")["threat_model"].first()
    assert grants["imprint"] == ["active_architecture", "auxiliary_data", "model_weights"]
    assert grants["adapter_trap"] == ["active_parameters", "model_weights", "several_rounds"]
    assert "active_architecture" not in grants["patch_embedding"]


def test_the_page_has_a_line_for_each_case(finished) -> None:
    block = imprint_block(finished)
    assert block.count("\n") == 3
    assert "| `imprint` calibrated | photographs | vit_micro_32, " in block
    assert "| adapters | 1 | 2 | 1 of 1 |" in block
    assert "`patch_embedding` returns a mixture" in passive_block(finished)


def test_images_under_another_seed_have_lines_of_their_own(finished, monkeypatch) -> None:
    rows = load_rows(finished / "rows.jsonl.gz")
    every = pd.concat([rows, rows.assign(seed=1)], ignore_index=True)
    monkeypatch.setattr("experiments.imprint.render.read_rows", lambda folder: every)
    table = pd.read_csv(StringIO(imprint_files(finished)["table.csv"]))
    alone = pd.read_csv(finished / "table.csv")
    assert len(table) == 2 * len(alone)
    pd.testing.assert_frame_equal(table[table["seed"] == 0].reset_index(drop=True), alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "patch_embedding=mixed"], "the attack does not choose what is sent"),
        (["--attack-options", "imprint.bins=0"], "imprint.bins must be at least 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], message: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
