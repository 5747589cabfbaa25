"""The benchmark of the attacks' confidence: its plan of attacks, rows and table."""

from __future__ import annotations

import json
from pathlib import Path

import calibration
import pandas as pd
import pytest

from fedmjp.records.rows import load_rows

SMALL = ["--model", "vit_mini_32", "--weights", "random", "--num-images", "2", "--updates", "1", "2"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    return calibration.main([*SMALL, "--out", str(out), *options])


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("calibration") / "out"
    assert run(out, "--gammas", "0", "0.5") == 0
    return out


def places(folder: Path) -> set[tuple[str, str, int]]:
    rows = load_rows(folder / "rows.jsonl.gz")
    return set(zip(rows["defense"], rows["attack"], rows["round"], strict=True))


def test_named_attacks_follow_the_first_update_and_those_over_updates_the_others(named) -> None:
    first = {(defense, attack, 1) for defense in ("none", "mjp") for attack in ("patch_embedding", "mjp_subspace")}
    over = {(defense, "mjp_rounds", number) for defense in ("none", "mjp") for number in (1, 2)}
    assert places(named) == first | over
    table = pd.read_csv(named / "table.csv")
    assert set(table["count"]) == {2}
    exact = table[(table["gamma"] == 0) & (table["attack"] == "patch_embedding")].iloc[0]
    assert exact["vouched_mean"] == exact["right_mean"] == 1
    assert exact["excess_mean"] == 0


def test_auto_takes_what_the_updates_expose(tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--gammas", "0", "0.1", "--attacks", "auto", "--budget", "0.5s") == 0
    assert places(out) == {
        *(("none", "patch_embedding", 1), ("mjp", "patch_embedding", 1), ("mjp", "mjp_subspace", 1)),
        *(("mjp", "mjp_rounds", 2), ("mjp", "unmix_rounds", 2)),  # two updates show all patches
    }
    reasons = json.loads((out / "run.json").read_text())["not_run"]
    assert "one image" in reasons["batch_rounds"]
    assert "beyond the budget of 0.5 s" in reasons["dlg"]


def test_no_attacks_is_a_mistake(tmp_path, capsys) -> None:
    assert run(tmp_path / "out", "--attacks") == 2
    assert "--attacks takes auto, all, or names" in capsys.readouterr().err
