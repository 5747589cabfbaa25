"""The benchmark of small batches: the plane of steps, rows, resumption, mistakes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import batch_rounds
import pandas as pd
import pytest
from experiments.batches import protocol

from fedmjp.records.rows import load_rows
from tests.conftest import interrupted_at

pytestmark = pytest.mark.usefixtures("drawn")

SMALL = ["--model", "vit_mini_64", "--num-images", "5", "--batch-sizes", "2"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return batch_rounds.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("batches") / "out"
    assert run(out) == 0
    return out


@pytest.mark.parametrize("order", [2, 3, 5])
def test_any_two_images_meet_once(order: int) -> None:
    lines = protocol.affine_plane(order)
    met = [frozenset(pair) for line in lines for pair in combinations(line, 2)]
    assert len(met) == len(set(met)) == order**2 * (order**2 - 1) // 2
    assert sorted(point for line in lines[-order:] for point in line) == list(range(order**2))


def test_only_looking_back_separates_a_batch(finished) -> None:
    rows = load_rows(finished / "rows.jsonl.gz")
    assert len(rows) == 2 * 4  # two attacks, the one full plane of five images
    assert set(rows["batch_size"]) == {2}
    table = pd.read_csv(finished / "table.csv").set_index("attack")
    assert table.loc["batch_rounds", "psnr_first_decile"] > 50
    assert table.loc["patch_embedding", "psnr_median"] < 15
    assert (finished / "separated.png").stat().st_size > 10_000
    assert (finished / "run.json").exists()


def test_shuffled_epochs_hold_every_image_once_and_their_last_batches_are_attacked() -> None:
    schedule = protocol.Schedule.shuffled(images=9, size=2, epochs=3, targets=2, seed=0)
    epochs = [schedule.steps[start : start + 4] for start in range(0, 12, 4)]
    assert len(schedule.steps) == 12
    assert all(len({image for batch in epoch for image in batch}) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(schedule.attacked) == [8, 9]
    assert schedule.members == [image for batch in epochs[2][:2] for image in batch]
    assert protocol.Schedule.shuffled(9, 2, 3, 2, seed=1).steps != schedule.steps


@pytest.mark.long
def test_shuffled_epochs_separate_what_met_other_partners(tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--images", "photos", "--num-images", "12", "--epochs", "3", "--targets", "2") == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert set(rows["setting"]) == {"shuffled epochs of 12 images"}
    assert set(rows["round"]) == {3}
    found = rows[rows["attack"] == "batch_rounds"]
    assert len(found) == 4
    assert found["psnr"].min() > 50
    assert rows.loc[rows["attack"] == "patch_embedding", "psnr"].max() < 20


def test_attacks_are_chosen_for_batches_that_no_plane_has(tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--batch-sizes", "4", "--num-images", "8", "--epochs", "2", "--targets", "1") == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert set(rows["batch_size"]) == {4}
    assert rows.groupby("attack").size().to_dict() == {"batch_rounds": 4, "patch_embedding": 4}


@pytest.mark.long
def test_an_interrupted_run_is_finished_with_the_same_rows(finished, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    with interrupted_at(protocol, "score_found", 3):
        assert run(out) == 130
    assert run(out) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run(out, "--resume") == 0
    first, second = (load_rows(o / "rows.jsonl.gz").drop(columns="seconds") for o in (finished, out))
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-sizes", "4"], "primes"),
        (["--num-images", "3"], "must be at least 4"),
        (["--batch-sizes", "1", "--epochs", "2"], "from 2 on"),
        (["--batch-sizes", "8", "--epochs", "2"], "must be at least 8, a batch"),
        (["--epochs", "-1"], "0 or more"),
        (["--epochs", "2", "--targets", "0"], "--targets"),
        (["--images", "no/such/folder"], "neither a folder nor a data set"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]
