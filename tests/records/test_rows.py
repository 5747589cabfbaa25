"""The row log: round trip, resuming, and damage by a killed process or by manual edits."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from attacks.registry import UsageError
from fedmjp.records import sums
from fedmjp.records.rows import CASE, ROW_KEYS, RowLog, Schema, join_rows, load_rows, pack_rows, unpack_rows
from tests.records.sample_rows import make_row


def test_round_trip_keeps_values_and_key_order(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    row = make_row(image_id="é\u2028x", defense_parameters={"ratio": np.float32(0.25)})
    with RowLog(path) as log:
        assert log.append(dict(reversed(row.items())))
        assert not log.repaired
    written = json.loads(path.read_bytes())
    assert tuple(written) == ROW_KEYS
    assert written == row | {"defense_parameters": {"ratio": 0.25}}
    with RowLog(path) as log:
        assert log.rows() == [written]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -np.inf, np.float32("nan")])
def test_not_finite_becomes_null(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append(make_row(psnr=value, attack_parameters={"tv": [value]}))
    written = json.loads(path.read_bytes())
    assert written["psnr"] is None
    assert written["attack_parameters"] == {"tv": [None]}
    assert load_rows(path)["psnr"].isna().all()


def test_rows_with_missing_or_unknown_keys_are_refused_and_not_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    lacking = make_row()
    del lacking["psnr"]
    with RowLog(path) as log:
        with pytest.raises(ValueError, match=r"missing keys \['psnr'\]"):
            log.append(lacking)
        with pytest.raises(ValueError, match=r"unknown keys \['colour'\]"):
            log.append(make_row() | {"colour": 1})
    assert path.read_bytes() == b""


def test_a_disk_that_fills_between_a_row_and_its_checksum_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path, write, written = tmp_path / "rows.jsonl", sums._write, []

    def full(descriptor: int, content: bytes) -> None:
        """No room for the second of a row's two writes."""
        written.append(content)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "no space")
        write(descriptor, content)

    with RowLog(path) as log:
        assert log.append(make_row(client=0))
        monkeypatch.setattr(sums, "_write", full)
        with pytest.raises(OSError, match="no space"):
            log.append(make_row(client=1))
        assert log.append(make_row(client=2))
    with RowLog(path) as log:
        assert [row["client"] for row in log.rows()] == [0, 2]


@pytest.mark.parametrize("cut", [1, 40, -3])
def test_incomplete_last_line_is_removed(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        for client in range(3):
            log.append(make_row(client=client, image_id="é"))
    whole = path.read_bytes()
    first_two, last = whole[: 2 * (len(whole) // 3)], whole[2 * (len(whole) // 3) :]
    path.write_bytes(first_two + last[:cut])
    assert list(load_rows(path)["client"]) == [0, 1]
    with RowLog(path) as log:
        assert log.repaired
        assert path.read_bytes() == first_two
        log.append(make_row(client=2, image_id="é"))
    assert path.read_bytes() == whole


def test_whole_last_row_without_line_end_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append(make_row())
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip(b"\n"))
    with RowLog(path) as log:
        assert log.repaired
        assert log.done(make_row(), ["face_0001"])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"{oops", b"", b"[]", b'{"psnr": 1}', b"\xff\xfe"])
def test_damaged_middle_line_names_file_and_line(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        for client in range(3):
            log.append(make_row(client=client))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + b"\n" + lines[2])
    for read in (RowLog, load_rows):
        with pytest.raises(UsageError, match=r"rows\.jsonl, line 2"):
            read(path)
    assert path.read_bytes() == lines[0] + damage + b"\n" + lines[2]


def test_done_needs_every_image_of_the_batch(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append(make_row(image=0))
        assert not log.done(make_row(), ["face_0001", "face_0002"])
    with RowLog(path) as log:  # resumed: the batch is attacked again, its first image is there already
        assert not log.append(make_row(image=0))
        assert log.append(make_row(image=1, image_id="face_0002"))
        assert log.done(make_row(), ["face_0001", "face_0002"])
        with pytest.raises(ValueError, match="appended twice"):
            log.append(make_row(image=1, image_id="face_0002"))
    assert len(load_rows(path)) == 2


@pytest.mark.parametrize("name", CASE)
def test_rows_that_differ_in_a_key_of_the_identity_are_different(tmp_path, name):
    other = make_row(**{name: {"x": 1} if name.endswith("parameters") else 17})
    with RowLog(tmp_path / "rows.jsonl") as log:
        log.append(make_row())
        assert not log.done(other, ["face_0001"])
        assert log.append(other)


@pytest.mark.parametrize("name", ["commit", "device", "psnr", "seconds", "run_id"])
def test_rows_that_differ_in_other_keys_only_are_the_same(tmp_path, name):
    with RowLog(tmp_path / "rows.jsonl") as log:
        log.append(make_row())
        assert log.done(make_row(**{name: "other"}), ["face_0001"])


def test_missing_file_raises(tmp_path):
    with pytest.raises(UsageError, match="no results file"):
        load_rows(tmp_path / "rows.jsonl")


def test_rows_without_the_optional_key_flags_get_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    old = {key: value for key, value in make_row().items() if key != "flags"}
    path.write_text(json.dumps(old) + "\n")
    assert load_rows(path)["flags"].tolist() == [[]]
    with RowLog(path) as log:
        assert log.done(make_row(), ["face_0001"])
        log.append({key: value for key, value in make_row(client=3).items() if key != "flags"})
    assert load_rows(path)["flags"].tolist() == [[], []]


def test_another_schema_has_its_own_keys_and_identity(tmp_path):
    schema = Schema(("cell", "value", "note"), ("cell",), {"note": ""})
    path = tmp_path / "cells.jsonl"
    with RowLog(path, schema) as log:
        assert log.append({"value": 1.0, "cell": "a"})
        assert log.has({"cell": "a"})
        assert not log.has({"cell": "b"})
        with pytest.raises(ValueError, match=r"unknown keys \['psnr'\]"):
            log.append({"cell": "b", "value": 1.0, "psnr": 3.0})
    with RowLog(path, schema) as log:
        assert log.rows() == [{"cell": "a", "value": 1.0, "note": ""}]
        assert not log.append({"cell": "a", "value": 2.0})
    with pytest.raises(UsageError, match="line 1: not a results row"):
        RowLog(path)


def test_rows_are_joined_whole_and_checked(tmp_path):
    parts = [tmp_path / name / "rows.jsonl" for name in ("a", "b")]
    for number, part in enumerate(parts):
        with RowLog(part) as log:
            log.append(make_row(image_id=f"image {number}"))
    joined = join_rows(parts, tmp_path / "rows.jsonl")
    assert joined == tmp_path / "rows.jsonl.gz"
    assert load_rows(joined)["image_id"].tolist() == ["image 0", "image 1"]
    parts[1].write_bytes(parts[1].read_bytes().replace(b"image 1", b"image 2"))
    with pytest.raises(UsageError, match=r"b/rows.jsonl, line 1"):
        join_rows(parts, tmp_path / "rows.jsonl")
    assert load_rows(joined)["image_id"].tolist() == ["image 0", "image 1"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "rows.jsonl.gz"}


def test_rows_that_only_the_compressed_file_holds_are_not_packed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append(make_row(image_id="first"))
    packed = pack_rows(path)
    unpack_rows(path)
    with RowLog(path) as log:
        log.append(make_row(image_id="second"))
    unpack_rows(path)  # an interrupted run leaves both files
    assert list(load_rows(path)["image_id"]) == ["first", "second"]
    path.unlink()
    (tmp_path / "rows.jsonl.sums").unlink()
    with RowLog(path) as log:
        log.append(make_row(image_id="third"))
    with pytest.raises(UsageError, match=r"does not go on from rows\.jsonl\.gz, whose rows would be lost"):
        unpack_rows(path)
    assert list(load_rows(packed)["image_id"]) == ["first"]
    assert list(load_rows(path)["image_id"]) == ["third"]
