"""The benchmark of what each objective leaks: rows, resumption, mistakes."""

from __future__ import annotations

from pathlib import Path

import objectives_leak
import pandas as pd
import pytest

from fedmjp.records.rows import load_rows

SMALL = ["--lines", "mp3_random", "mst", "--num-images", "2", "--steps", "400"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return objectives_leak.main([*options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("objectives_leak") / "out"
    assert run(out, *SMALL) == 0
    return out


def test_a_head_of_places_leaks_and_two_views_are_scored_as_two(finished) -> None:
    table = pd.read_csv(finished / "table.csv")
    mp3 = table[table["attack"] == "position_head"].iloc[0]
    assert (mp3["answer"], mp3["closed_form"], mp3["count"]) == ("leaks", 1, 1)
    mst = table[table["objective"].str.startswith("mst")]
    assert set(zip(mst["attack"], mst["updates"], strict=True)) == {
        (attack, updates) for attack in ("patch_embedding", "batch_rounds") for updates in (1, 8)
    }
    assert set(mst["count"]) == {2}
    assert mst["diagnosis"].str.startswith("the batch holds 2 images").all()


def test_resuming_a_finished_run_adds_nothing(finished) -> None:
    before = len(load_rows(finished / "rows.jsonl.gz"))
    assert run(finished, *SMALL, "--resume") == 0
    assert len(load_rows(finished / "rows.jsonl.gz")) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lines", "mp3_trained"], "need --pretrained mp3=FILE; or"),
        (["--lines", "mst_trained", "--pretrained", "mp3=a"], "need --pretrained mst=FILE; or"),
        (["--lines", "mst_trained", "--pretrained", "mst"], "--pretrained mst: write NAME=FILE, with NAME one of mp3"),
        (["--lines", "mae"], "choose from supervised, mp3_trained"),
        (["--lines", "mst", "--steps", "0"], "--steps must be at least 1"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str, tmp_path, capsys) -> None:
    assert run(tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
