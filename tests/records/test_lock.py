"""One writer for a folder: other processes are refused, the same one is not, and a crash leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import UsageError
from fedmjp.records.lock import FolderLock, leave_to_parent

pytest.importorskip("fcntl", reason="this system has no flock")

HOLD = """
import sys, pathlib
from fedmjp.records.lock import FolderLock
FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen:
    """A process that holds the folder until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(UsageError, match="another process is writing to .*; wait until it ends"):
            FolderLock(tmp_path)
    finally:
        process.kill()
        process.wait()
    FolderLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_one_process_may_hold_a_folder_more_than_once(tmp_path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.release()
    first.release()  # no effect
    with pytest.raises(AssertionError):
        holder(tmp_path)  # the second still holds it: the other process ends without a line
    second.release()
    process = holder(tmp_path)
    process.communicate()


def test_a_forked_process_leaves_the_lock_to_its_parent(tmp_path) -> None:
    lock, (read, write) = FolderLock(tmp_path), os.pipe()
    child = os.fork()
    if not child:
        leave_to_parent()
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    try:
        with pytest.raises(AssertionError):
            holder(tmp_path)  # the parent still holds it
        lock.release()
        process = holder(tmp_path)  # though the child lives
        process.communicate()
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
