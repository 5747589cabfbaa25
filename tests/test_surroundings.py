"""What is around a command is bad: full disks, strange names, files that are no pictures. One line, and no waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import numpy as np
import pytest
from experiments.leakage.options import Options
from PIL import Image

from attacks import UsageError
from fedmjp.cli import EXIT_FAILURE, guarded, terminal
from fedmjp.data import load_data, load_gallery
from fedmjp.records import provenance

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.fixture
def pictures(tmp_path):
    """A folder with brackets and "=" in its name; one class holds what is no picture."""
    root = tmp_path / "a=b [bold]x[/bold]"
    for name, count in (("cat", 3), ("[red]dog", 3)):
        (root / name).mkdir(parents=True)
        for index in range(count):
            pixels = np.full((8, 8, 3), 20 * index, np.uint8)
            Image.fromarray(pixels).save(root / name / f"x={index}.png")
    (root / "cat" / "drawing.png").write_bytes(EPS)
    os.mkfifo(root / "cat" / "pipe.png")
    with contextlib.suppress(OSError):  # a file system that takes UTF-8 alone
        Image.new("RGB", (8, 8)).save(os.fsdecode(os.fsencode(root / "cat") + b"/\xff.png"))
    return root


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_fifos_and_eps_are_left_out_and_strange_names_are_read(pictures, monkeypatch) -> None:
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    data = load_data(f"folder:{pictures}", size=8)
    assert sorted(data.skipped) == ["cat/drawing.png: UnidentifiedImageError", "cat/pipe.png: no regular file"]
    gallery = load_gallery(str(pictures), size=8)
    names = [*data.train.ids, *data.test.ids]
    assert sorted(names) == sorted(gallery.images.ids)
    assert len(gallery.skipped) == 2
    for name in names:
        name.encode()  # what tables and pages can hold
    assert gallery.images.images(range(len(gallery.images))).shape[0] == len(names)


def test_brackets_and_stray_bytes_are_printed_as_they_are(tmp_path, monkeypatch, capfd) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        terminal().print(f"report: {os.fsdecode(b'/[bold]x[/]/' + bytes([255]))}", soft_wrap=True, highlight=False)
    assert (tmp_path / "out").read_text() == "report: /[bold]x[/]/\\udcff\n"
    monkeypatch.setattr(sys, "argv", ["x", "--out", os.fsdecode(b"\xff")])
    provenance.command("x").encode()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_no_more_is_one_line(code: int, capsys) -> None:
    def work() -> None:
        raise OSError(code, os.strerror(code), "out/rows.jsonl")

    assert guarded(work, lambda: "go on with --resume") == EXIT_FAILURE
    error = capsys.readouterr().err
    assert error == f"error: out/rows.jsonl: {os.strerror(code)}; once that is mended: go on with --resume\n"


def test_other_errors_of_the_system_are_not_hidden() -> None:
    def work() -> None:
        raise FileNotFoundError(errno.ENOENT, "a mistake of this program", "x")

    with pytest.raises(FileNotFoundError):
        guarded(work, lambda: "")


def test_equals_signs_in_paths_of_weights() -> None:
    found = Options(model=("vit_mini_32",), weights=("/data/a=b/model.safetensors",)).sources()
    assert found == {"vit_mini_32": "/data/a=b/model.safetensors"}
    found = Options(model=("vit_mini_32",), weights=("vit_mini_32=/data/a=b.safetensors",)).sources()
    assert found == {"vit_mini_32": "/data/a=b.safetensors"}
    with pytest.raises(UsageError):
        Options(weights=("vit_xxl=random",)).sources()
