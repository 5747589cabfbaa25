"""Features of batches from the classifier's gradient: rows, table, resumption, mistakes."""

from __future__ import annotations

import batch_features
import pandas as pd
import pytest
from experiments.batch_features.render import SCHEMA, batch_features_block

from fedmjp.records.rows import load_rows

SMALL = ["--model", "vit_mini_32", "--images", "photos", "--batches", "2", "--examples", "64", "--threads", "1"]


def test_features_of_every_batch_below_the_number_of_classes(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert batch_features.main([*SMALL, "--batch-sizes", "1", "3", "--out", str(out)]) == 0
    assert batch_features.main([*SMALL, "--batch-sizes", "10", "--out", str(out), "--resume"]) == 0
    table = pd.read_csv(out / "table.csv").set_index(["batch_size", "labels"])
    assert (table.loc[[1, 3], "solved"] == 2).all()
    assert (table.loc[[1, 3], "feature_error_max"] < 1e-4).all()
    assert (table.loc[[10], "solved"] == 0).all()
    rows = load_rows(out / "rows.jsonl.gz", SCHEMA)
    assert len(rows) == 12
    assert rows.loc[rows["batch_size"] == 10, "obstacle"].str.contains("at most 9 images apart").all()
    assert batch_features.main([*SMALL, "--batch-sizes", "1", "3", "--out", str(out), "--resume"]) == 0
    assert load_rows(out / "rows.jsonl.gz", SCHEMA).equals(rows)
    assert "| vit_mini_32, 32 px, trained | 10 | 3 | 2 of 2 | 2 of 2 |" in batch_features_block(out)
    assert batch_features.main([*SMALL, "--out", str(out)]) == 2
    assert "pass --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-sizes", "0"], "none below 1"),
        (["--batches", "0"], "batches"),
        (["--batch-sizes", "2000"], "need 4000; lower --batches or --batch-sizes"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], words: str) -> None:
    assert batch_features.main([*SMALL, "--out", str(tmp_path / "out"), *options]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1
