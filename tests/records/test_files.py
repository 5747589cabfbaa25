"""Files that a run is resumed from: whole or not there, and refused in one line where they are not as written."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from attacks import UsageError
from fedmjp.records.files import read_record, read_sealed, write_record, write_sealed, write_whole
from fedmjp.records.image_digests import FILE, ImageDigests
from fedmjp.records.rows import RowLog, load_rows
from fedmjp.records.run_record import note_run, note_start
from tests.records.sample_rows import make_row


def damaged(content: bytes):
    """A file cut short, with one bit flipped at several places, and emptied."""
    yield from (content[: len(content) // 2], content[:-1], b"")
    for place in (3, len(content) // 3, len(content) - 2):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_every_damage_of_a_sealed_file_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "state"
    write_sealed(path, bytes(range(256)), {"round": 3})
    assert read_sealed(path, "start again") == (bytes(range(256)), {"round": 3})
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"state is damaged: .*; start again$") as caught:
            read_sealed(path, "start again")
        assert "\n" not in str(caught.value)


def test_every_damage_of_a_record_is_refused_and_old_records_are_read(tmp_path) -> None:
    path = tmp_path / "run.json"
    write_record(path, {"b": [1, None], "a": {"x": 0.1, "path": "\udcff"}})
    assert read_record(path) == {"b": [1, None], "a": {"x": 0.1, "path": "\udcff"}}
    whole = path.read_bytes()
    for content in damaged(whole.rstrip(b"\n")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="run.json (is damaged|cannot be read)"):
            read_record(path)
    path.write_text(json.dumps({"finished": True}))
    assert read_record(path) == {"finished": True}


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_changed_row_is_refused_by_its_line(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        for client in range(3):
            log.append(make_row(client=client, psnr=31.0))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"31.0", b"71.0") + lines[2])
    for read in (RowLog, load_rows):
        with pytest.raises(UsageError, match=r"rows\.jsonl, line 2: not as it was written"):
            read(path)
    path.write_bytes(lines[0] + lines[1])
    with pytest.raises(UsageError, match="holds 2 lines, and 3 were written"):
        load_rows(path)


def test_a_row_without_a_checksum_yet_is_kept(tmp_path) -> None:
    """Killed between the two writes."""
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append(make_row(client=0))
        log.append(make_row(client=1))
    sums = path.with_name("rows.jsonl.sums")
    whole = sums.read_bytes()
    sums.write_bytes(whole[:-4])
    with RowLog(path) as log:
        assert len(log.rows()) == 2
    assert sums.read_bytes() == whole


def test_rows_that_are_there_twice_are_refused(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(2 * (json.dumps(make_row()) + "\n"))
    for read in (RowLog, load_rows):
        with pytest.raises(UsageError, match="line 2: the same row as line 1"):
            read(path)


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part(tmp_path, monkeypatch) -> None:
    path, written = tmp_path / "rows.jsonl", os.write
    with RowLog(path) as log:
        log.append(make_row(client=0))
        whole = path.read_bytes()

        def full(descriptor: int, content) -> int:
            if len(content) < 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written(descriptor, content[:100])  # the disk takes some of it first

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left"):
                log.append(make_row(client=1))
        assert path.read_bytes() == whole
        assert log.append(make_row(client=1))
    assert len(load_rows(path)) == 2


def test_damaged_packed_rows_are_one_line(tmp_path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00 and no more")
    with pytest.raises(UsageError, match=r"rows\.jsonl\.gz is damaged"):
        load_rows(path)


def test_other_pictures_of_the_same_names_are_refused(tmp_path) -> None:
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ImageDigests(tmp_path, "folder:x").check(["a", "b", "ü\n"], images)
    assert len((tmp_path / FILE).read_text().splitlines()) == 3
    again = ImageDigests(tmp_path, "folder:x")
    again.check(["a", "b", "ü\n"], images)
    with pytest.raises(UsageError, match="image 'b' of folder:x is not the one that"):
        again.check(["b"], images[:1])
    ImageDigests(tmp_path, "folder:y").check(["b"], images[:1])  # of another data set
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-20])  # killed while it wrote the last line
    ImageDigests(tmp_path, "folder:x").check(["a", "b", "ü\n"], images)


def test_a_record_says_that_rows_are_unfinished_until_they_are(tmp_path) -> None:
    note_start(tmp_path)
    assert read_record(tmp_path / "run.json") == {"finished": False}
    note_run(tmp_path, "command", devices=["cpu"], finished=True)
    note_start(tmp_path)
    record = read_record(tmp_path / "run.json")
    assert record["finished"] is False
    assert record["devices"] == ["cpu"]
