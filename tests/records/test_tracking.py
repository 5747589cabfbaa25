"""What `--log tensorboard` writes, read by TensorBoard itself."""

from __future__ import annotations

import pandas as pd
import pytest

from attacks import UsageError
from fedmjp.config import from_flat
from fedmjp.records.rows import load_rows
from fedmjp.records.tracking import FOLDER
from fedmjp.simulate import main

SMALL = ["--model", "vit_micro_32", "--weights", "random", "--clients", "2", "--rounds", "2", "--test-limit", "8"]


def test_accuracy_and_leakage_by_round(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    own = ["--attacks", "patch_embedding", "--threads", "1", "--log", "tensorboard", "--out", str(out)]
    assert main([*SMALL, *own]) == 0
    events = EventAccumulator(str(out / FOLDER))
    events.Reload()
    rounds, rows = pd.read_csv(out / "rounds.csv"), load_rows(out / "rows.jsonl")
    assert [e.value for e in events.Scalars("none/accuracy")] == pytest.approx(rounds["accuracy"].tolist(), abs=1e-6)
    expected = rows[rows["attack"] == "patch_embedding"].groupby("round")["psnr"].mean()
    found = events.Scalars("none/psnr/patch_embedding")
    assert [e.step for e in found] == [1, 2]
    assert [e.value for e in found] == pytest.approx(expected.tolist(), rel=1e-5)
    assert main([*SMALL, *own[:-4], "--out", str(out), "--resume"]) == 0  # the log decides about no number


def test_without_tensorboard(monkeypatch) -> None:
    monkeypatch.setattr("fedmjp.config.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fedmjp\[tensorboard\]'"):
        from_flat({"log": "tensorboard"}).validate()
