"""Measures of scale run whole, and the report's memory grows by little with its rows."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import scale
from experiments.scaffold import RESULTS
from experiments.scale import protocol
from experiments.scale.logs import write_log
from experiments.scale.render import capacity_block, scale_block

from fedmjp.metrics import intervals
from fedmjp.records.rows import load_rows
from fedmjp.report import as_terminal_lines, read_panels, read_rows, summarise, summary_files, verdicts


@pytest.fixture
def log(tmp_path: Path):
    """From a number of rows to the folder of a log of so many."""

    def make(count: int) -> Path:
        folder = tmp_path / str(count)
        folder.mkdir()
        write_log(RESULTS / "simulate", folder, count)
        return folder

    return make


def test_its_tables_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "alone", lambda work, *arguments: work(*arguments))  # in this process
    sizes = ["--clients", "2", "--audited", "2", "3", "--log-rows", "150", "--audit-model", "vit_micro_32"]
    out = tmp_path / "scale"
    assert scale.main([*sizes, "--data", "photos", "--out", str(out)]) == 0
    table = pd.read_csv(out / "table.csv")
    assert table["measured"].tolist() == ["round", "audit", "audit", "report"]
    assert (table["seconds"] > 0).all()
    assert table["disk_mib"].notna().tolist() == [False, True, True, True]
    assert "| round, 2 clients of `vit_micro8_32` |" in scale_block(out)
    assert json.loads((out / "run.json").read_text())["finished"]
    assert sorted(path.name for path in out.iterdir()) == ["rows.jsonl.gz", "run.json", "table.csv"]
    assert scale.main(["--clients", "0", "--out", str(tmp_path / "x")]) == 2


def peak(work: Callable[[], object]) -> int:
    """Bytes that are allocated at most during a call."""
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_a_row_that_is_read_takes_less_than_half_a_kilobyte(log) -> None:
    """Its line has 1.3; of the columns that vary, most are numbers."""
    few, many = log(500), log(3000)
    read_rows(few)  # what is imported and cached the first time
    growth = (peak(lambda: read_rows(many)) - peak(lambda: read_rows(few))) / 2500
    assert growth < 500, f"{growth:.0f} bytes a row"


@pytest.mark.long
def test_a_report_takes_less_than_a_kilobyte_a_row(log, monkeypatch) -> None:
    """Of 4,000 and 20,000 rows; every mean is taken to have many values, so that nothing is resampled."""
    monkeypatch.setattr(intervals, "MANY", 10)
    monkeypatch.setattr(intervals, "MOST_SKEWED", 1e9)
    folder = log(1000)
    read = read_rows(folder)

    def make(times: int) -> None:
        clients = 1 + read["client"].max()
        rows = pd.concat([read.assign(client=read["client"] + clients * n) for n in range(times)], ignore_index=True)
        assert rows["attack"].dtype == "category"
        found, _ = verdicts(rows, {}), read_panels(folder, rows)
        summary_files(rows)
        as_terminal_lines(rows, found, {})

    make(1)
    growth = (peak(lambda: make(20)) - peak(lambda: make(4))) / 16_000
    assert growth < 1000, f"{growth:.0f} bytes a row"


def test_compact_rows_give_the_same_report(log) -> None:
    folder = log(300)
    whole, compact = load_rows(folder / "rows.jsonl"), read_rows(folder)
    pd.testing.assert_frame_equal(summarise(whole), summarise(compact))
    assert summary_files(whole) == summary_files(compact)
    assert verdicts(whole, {}) == verdicts(compact, {})
    lines = [
        [str(getattr(line, "renderable", line)) for line in as_terminal_lines(rows, verdicts(rows, {}), {})]
        for rows in (whole, compact)
    ]
    assert lines[0] == lines[1]


def test_the_committed_table_is_of_every_size() -> None:
    table = pd.read_csv(RESULTS / "scale" / "table.csv")
    assert set(table["clients"]) >= {10, 100, 1000, 10_000}
    assert set(table["log_rows"]) >= {10_000, 100_000, 1_000_000}
    largest = table[table["log_rows"] == 1_000_000].iloc[0]
    assert largest["peak_mib"] < 512
    assert largest["page_mib"] < 2
    assert "a million" in capacity_block(RESULTS / "scale")
