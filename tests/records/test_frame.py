"""Columns built row by row: the types that pandas gives to lists, equal values held once, repeated rows found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attacks.registry import UsageError
from fedmjp.records import frame
from fedmjp.records.frame import build_frame
from fedmjp.records.identity import identity, require_distinct

COLUMNS: dict[str, list[Any]] = {
    "whole": [1, 2, 3, 4, 5],
    "beyond 64 bits": [1, 2, 3, 2**70, 5],
    "numbers": [1.5, 2.5, 3.5, 4.5, 5.5],
    "whole at first": [1, 2, 3, 4.5, 5],
    "missing": [1.5, None, 2.5, None, 3.5],
    "missing at first": [None, None, None, 4.5, 5],
    "whole, then missing": [1, 2, None, 4, 5],
    "nothing": [None] * 5,
    "answers": [True, False, True, False, True],
    "answers, some missing": [True, None, True, False, True],
    "text": ["a", "b", "a", "c", "a"],
    "text, some missing": ["a", None, "a", "c", "a"],
    "text and numbers": ["a", 1, "b", 2.5, "a"],
    "lists": [["x"], [], ["x"], ["y"], []],
    "parameters": [{"steps": 1}, {}, {"steps": 1}, {"steps": 2}, {}],
}


@pytest.mark.parametrize("at_once", [2, 256])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_have_the_types_that_pandas_gives_to_lists(monkeypatch, name: str, at_once: int) -> None:
    monkeypatch.setattr(frame, "AT_ONCE", at_once)
    rows = [{name: value} for value in COLUMNS[name]]
    pd.testing.assert_frame_equal(build_frame(rows, [name]), pd.DataFrame({name: COLUMNS[name]}))
    compact = build_frame(rows, [name], categories=True)[name]
    assert (compact.dtype == "category") == (name == "text")
    assert [None if value is None or value != value else value for value in compact.tolist()] == COLUMNS[name]


def test_equal_values_are_one_object() -> None:
    lists = build_frame([{"x": ["a", 1]}, {"x": ["a", 1]}, {"x": ["b"]}], ["x"])["x"]
    assert lists[0] is lists[1]
    assert lists.tolist() == [["a", 1], ["a", 1], ["b"]]


def test_the_first_row_that_is_repeated_is_named_with_the_one_before_it() -> None:
    def identities(values: str) -> bytes:
        return b"".join(identity({"x": value}, ["x"]) for value in values)

    require_distinct(identities("abcdefgh"), Path("rows.jsonl"))
    with pytest.raises(UsageError, match="line 5: the same row as line 2, "):
        require_distinct(identities("abcdbaab"), Path("rows.jsonl"))
