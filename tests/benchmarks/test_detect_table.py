"""The benchmark of detection: rows and resumption, areas under curves, and what the committed honest rounds say."""

from __future__ import annotations

import math
import re
from pathlib import Path

import detect
import pandas as pd
import pytest
from experiments.detect.render import FEDERATION, HONEST, ROWS, SCORE, SENT, auc, read_checks
from experiments.scaffold import RESULTS

from fedmjp.detect import STATISTICS, THRESHOLDS, calibrate
from fedmjp.records.rows import load_rows
from tests.conftest import leave_undrawn

SMALL = ["--model", "vit_micro_32", "--data", "photos", "--starts", "scratch", "--partitions", "iid"]
SMALL += ["--rounds", "2", "--clients", "2", "--batch-size", "4", "--train-limit", "16", "--attacked-rounds", "2"]
SMALL += ["--threads", "1", "--updates", "gradient"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return detect.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("detect") / "out"
    with pytest.MonkeyPatch.context() as patched:
        leave_undrawn(patched)
        assert run(out, "--strengths", "0.9") == 0
    return out


def test_honest_and_prepared_models_are_checked(finished: Path) -> None:
    rows = load_rows(finished / "rows.jsonl.gz", ROWS)
    honest = rows[rows["attack"] == HONEST]
    assert sorted(zip(honest["purpose"], honest["round"], honest["client"], strict=True)) == [
        (purpose, number, client) for purpose in ("calibration", "evaluation") for number in (1, 2) for client in (0, 1)
    ]
    assert all(("distance" in unstated) == (number == 1) for unstated, number in honest[["unstated", "round"]].values)
    prepared = read_checks(finished)[0].query("attack != @HONEST")
    assert sorted(zip(prepared[SENT], prepared["probe"], strict=True)) == [
        *(("feature_fishing", number) for number in (1, 2)),
        *(("fishing", number) for number in (1, 1, 2)),
        *(("fishing, local_steps=adamw", number) for number in (1, 2)),
        *(("fishing, local_steps=sgd", number) for number in (1, 2)),
        *(("fishing, single_out: to the others", number) for number in (1, 2)),
        *(("imprint", number) for number in (1, 2)),
        *(("token_bins", number) for number in (1, 2)),
    ]
    layers = prepared["threat_model"].map(lambda grants: "active_architecture" in grants)
    assert (layers == (prepared["attack"] == "imprint")).all()
    whole = prepared[(prepared[SENT] == "fishing") & (prepared["probe"] == 2)].iloc[0]
    assert whole["statistics"]["silent_images"] == 0.75  # of four images one sends, whose class the first round read
    assert whole["psnr"] > 40
    table = pd.read_csv(finished / "table.csv").set_index("attack")
    assert table.loc["fishing", "checks"] == 2
    assert table.loc["fishing", "flagged"] == table.loc["fishing", "auc"] == 1.0
    assert table.loc["imprint", ["checks", "auc_bins", "flagged"]].tolist() == [2, 1.0, 1.0]
    assert table.loc["imprint", "psnr_median"] > 40  # out of the layer that the client built
    others = prepared[prepared["place"] > 0]
    assert others["diagnosis"].str.contains("2 images of class").all()  # of the four of the client that is singled out
    assert pd.read_csv(finished / "curve.csv")["strength"].tolist() == [0.9, 1.0]


def test_a_finished_run_takes_more_strengths(finished: Path, undrawn) -> None:
    before = load_rows(finished / "rows.jsonl.gz", ROWS)
    assert run(finished, "--strengths", "0.9", "0.99", "--resume") == 0
    after = load_rows(finished / "rows.jsonl.gz", ROWS)
    assert len(after) == len(before) + 1
    assert after.iloc[-1]["attack_parameters"]["strength"] == 0.99


def test_auc_is_that_of_all_pairs() -> None:
    one, other = [0.3, 0.9, float("nan"), 0.5], [0.5, 0.1, 0.5, float("nan"), 0.4]
    pairs = [(a, b) for a in one for b in other if not math.isnan(a) and not math.isnan(b)]
    assert auc(one, other) == pytest.approx(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert math.isnan(auc([], other))


def test_thresholds_lie_above_what_was_seen() -> None:
    found = calibrate({"row_norms": [0.1, None, 0.2], "row_spread": [0.8], "bias_range": [3.0], "bins": [0.0]})
    assert found == {"row_norms": 0.4, "row_spread": 0.9, "bias_range": 6.0, "bins": 0.2}


def test_the_thresholds_are_those_of_the_committed_rounds() -> None:
    _, thresholds = read_checks(RESULTS / "detect")
    assert thresholds == THRESHOLDS
    assert list(thresholds) == list(STATISTICS)


def test_at_most_one_honest_round_of_a_hundred_alarms() -> None:
    rows, _ = read_checks(RESULTS / "detect")
    honest = rows[(rows["attack"] == HONEST) & (rows["purpose"] == "evaluation")]
    rounds = honest.groupby([*FEDERATION, "round"])[SCORE].max()
    assert len(rounds) >= 100
    assert (rounds > 1).mean() <= 0.01
    assert set(honest["seed"]).isdisjoint(rows[rows["purpose"] == "calibration"]["seed"])


def test_the_page_lists_every_statistic() -> None:
    page = (RESULTS.parent / "docs" / "detection.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page[: page.index("## Thresholds")], re.MULTILINE)
    assert listed == list(STATISTICS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--starts", "nowhere"], "--starts nowhere: choose from scratch, encoder, trained"),
        (["--seeds", "1", "1"], "--seeds takes two different ones"),
        (["--strengths", "1.0"], "--strengths takes numbers in (0, 1)"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], message: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
