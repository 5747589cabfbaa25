"""The speed benchmark runs whole and compares like with like; how fast it is, is no test."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import speed


@pytest.mark.slow
def test_writes_its_tables(tmp_path, capsys) -> None:
    pytest.importorskip("breaching")
    options = ["--model", "vit_mini_64", "--images", "2", "--batch-size", "2", "--repeats", "1"]
    assert speed.main([*options, "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "speed.csv").set_index("block")
    assert (table["ours_over_bare"] > 0).all()
    assert table.loc["april", "peer_over_ours"] > 0
    drivers = pd.read_csv(tmp_path / "drivers.csv")
    assert len(drivers) == 5
    assert drivers["relative_error"].max() < 0.1
    assert json.loads((tmp_path / "machine.json").read_text())["lpips"] is False
    assert "without LPIPS" in capsys.readouterr().out


def test_the_peer_is_given_the_same_gradients_and_finds_the_same_image(monkeypatch) -> None:
    pytest.importorskip("breaching")
    bench = speed.Bench(speed.Options(model="vit_mini_64", images=2, batch_size=2), "april")
    scored: list[float] = []
    score = bench.score

    def noting(found, originals):
        records = score(found, originals)
        scored.extend(r["psnr"] for r in records)
        return records

    bench.score = noting
    bench.peer()
    bench.ours()
    assert scored[:2] == pytest.approx(scored[2:], abs=1.0)


def test_nonsense_is_refused(tmp_path, capsys) -> None:
    assert speed.main(["--images", "0", "--out", str(tmp_path)]) == 2
    assert "--images must be at least 1" in capsys.readouterr().err
