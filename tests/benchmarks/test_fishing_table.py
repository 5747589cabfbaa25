"""The benchmark of an active server: batches by label, rows, resumption, the curve of rounds, mistakes."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from pathlib import Path

import fishing
import pandas as pd
import pytest
from experiments.fishing.batches import draw_batches
from experiments.fishing.render import fishing_block, fishing_files

from attacks import UsageError
from fedmjp.models.weights import SHIPPED
from fedmjp.records.rows import load_rows

pytestmark = pytest.mark.usefixtures("drawn")

SMALL = ["--batch-sizes", "4", "--clients", "1", "--threads", "1"]
LABELS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return fishing.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("fishing") / "out"
    assert run(out, "--cases", "fishing=distinct", "feature_fishing=equal") == 0
    return out


def test_batches_have_the_labels_that_are_asked_for() -> None:
    distinct = draw_batches(LABELS, 3, "distinct", 2, seed=0)
    assert all(len({LABELS[i] for i in batch}) == 3 for batch in distinct)
    equal = draw_batches(LABELS, 2, "equal", 4, seed=0)
    assert all(len({LABELS[i] for i in batch}) == 1 for batch in equal)
    for batches in (distinct, equal, draw_batches(LABELS, 5, "mixed", 2, seed=0)):
        assert max(Counter(i for batch in batches for i in batch).values()) == 1
    with pytest.raises(UsageError, match="1 clients with 5 images of distinct labels each need more images or labels"):
        draw_batches(LABELS, 5, "distinct", 1, seed=0)


def test_every_image_comes_back_and_an_honest_server_gets_a_mixture(finished) -> None:
    table = pd.read_csv(finished / "table.csv").set_index(["setting", "attack"])
    for case in (("distinct labels", "fishing"), ("equal labels", "feature_fishing")):
        assert table.loc[case, "recovered"] == table.loc[case, "count"] == 4
        assert table.loc[case, "psnr_min"] > 60
        assert table.loc[case, "rounds"] <= 5
        assert table.loc[(case[0], "patch_embedding"), "recovered"] == 0
    rows = load_rows(finished / "rows.jsonl.gz")
    active = rows["attack"].isin(["fishing", "feature_fishing"])
    assert (rows["threat_model"].map(lambda grants: "active_parameters" in grants) == active).all()
    assert (finished / "batch.png").stat().st_size > 1000


def test_the_curve_counts_images_by_round(finished) -> None:
    curve = pd.read_csv(finished / "rounds.csv")
    own = curve[curve["attack"] == "fishing"]
    assert list(own["round"]) == list(range(1, len(own) + 1))
    assert own["recovered"].is_monotonic_increasing
    assert own["recovered"].iloc[-1] == 4


def test_sums_and_local_epochs_are_lines_of_their_own(finished) -> None:
    sums = ["--sum-of", "2", "--attack-options", "fishing.single_out=true,fishing.local_steps=sgd"]
    local = ["--epochs", "2", "--minibatch", "2", "--rounds", "2", "--resume"]
    assert run(finished, "--cases", "fishing=distinct", *local, *sums) == 0
    rows = load_rows(finished / "rows.jsonl.gz")
    setting = "distinct labels, 2 local epochs of SGD at 0.01 in steps of 2 images, sum of 2 clients, one singled out"
    own = rows[(rows["setting"] == setting) & (rows["attack"] == "fishing")]
    assert (own["psnr"] > 60).sum() >= 1
    assert set(own["local_steps"]) == {4}
    assert own["threat_model"].map(lambda grants: "aggregate_only" in grants).all()
    table = pd.read_csv(finished / "table.csv")
    assert list(table[table["setting"] == setting]["count"].unique()) == [4]


@pytest.mark.long
def test_a_server_that_selects_its_clients_has_a_line_of_its_own(finished) -> None:
    """Client 0 of eight, two of which are drawn in a round, takes part in none of the first four."""
    sampled = ["--federation", "8", "--clients-per-round", "2", "--rounds", "4", "--resume"]
    for selects in ([], ["--select"]):
        assert run(finished, "--cases", "feature_fishing=equal", *sampled, *selects) == 0
    rows = load_rows(finished / "rows.jsonl.gz")
    own = rows[rows["setting"].str.contains("2 of 8 clients a round") & (rows["attack"] == "feature_fishing")]
    chosen = own["threat_model"].map(lambda grants: "client_selection" in grants)
    assert (own["setting"].str.endswith("the attacked one in all") == chosen).all()
    assert (own[chosen]["psnr"] > 60).tolist() == [True] * 4
    assert own[~chosen]["psnr"].isna().tolist() == [True] * 4
    assert set(own[~chosen]["diagnosis"]) == {"the client took part in no round, so that nothing was read"}


@pytest.mark.long
def test_a_trained_encoder_with_a_new_classifier_is_named_so(tmp_path) -> None:
    weights = ["--weights", "random", "--from", str(SHIPPED / "vit_mini_32.safetensors")]
    assert run(tmp_path / "out", "--cases", "fishing=distinct", "--rounds", "2", *weights) == 0
    rows = load_rows(tmp_path / "out" / "rows.jsonl.gz")
    assert set(rows["weights"]) == {"encoder of vit_mini_32.safetensors (head new)"}


def test_other_seeds_and_fewer_rounds_replace_no_row(finished, tmp_path, monkeypatch) -> None:
    rows = load_rows(finished / "rows.jsonl.gz")
    other, fewer = rows.assign(seed=1), rows.assign(round=rows["round"] - 1, psnr=float("nan"))
    monkeypatch.setattr("experiments.fishing.render.read_rows", lambda folder: rows)
    alone = {name: pd.read_csv(StringIO(text)) for name, text in fishing_files(finished).items()}
    every = pd.concat([rows, other, fewer], ignore_index=True)
    monkeypatch.setattr("experiments.fishing.render.read_rows", lambda folder: every)
    for name, text in fishing_files(finished).items():
        (tmp_path / name).write_text(text)
        table = pd.read_csv(StringIO(text))
        pd.testing.assert_frame_equal(table[table["seed"] == 0], alone[name], check_index_type=False)
        pd.testing.assert_frame_equal(table[table["seed"] == 1].reset_index(drop=True), alone[name].assign(seed=1))
    assert "| 4, seed 0 |" in fishing_block(tmp_path)
    assert "seed" not in fishing_block(finished)


def test_resuming_a_finished_run_adds_nothing(finished) -> None:
    before = len(load_rows(finished / "rows.jsonl.gz"))
    assert run(finished, "--cases", "fishing=distinct", "--resume") == 0
    assert len(load_rows(finished / "rows.jsonl.gz")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "fishing=odd"], "write ATTACK=LABELS with labels distinct, equal, mixed"),
        (["--cases", "patch_embedding=equal"], "the attack does not choose what is sent"),
        (["--cases", "fishin=equal"], "did you mean 'fishing'"),
        (["--cases", "fishing=distinct", "--batch-sizes", "50"], "need more images or labels"),
        (["--cases", "fishing=distinct", "--attack-options", "fishing.single_out=true"], "pass --sum-of NUMBER"),
        (["--cases", "fishing=distinct", "--epochs", "1", "--defense", "mjp"], "trains clients without a defence"),
        (["--federation", "8"], "--clients-per-round 0 of --federation 8 is no sample"),
        (["--select"], "--clients-per-round 0 of --federation 0 is no sample"),
        (["--federation", "8", "--clients-per-round", "2", "--sum-of", "2"], "leave --sum-of out"),
        (["--cases", "fishing=distinct", "--from", "model.safetensors"], "gives the encoder alone"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], message: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
