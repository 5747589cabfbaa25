"""A checksum for each line of an append-only file, in a file beside it: a changed line is refused by its number.

PATH.sums holds the CRC-32 of each line of PATH, eight hexadecimal digits a line. A line is written before its checksum,
so that a process that is killed between the two leaves one line without one, which is then given one.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from attacks.registry import UsageError

WIDTH = 9  # bytes of an entry


def sums_path(path: Path) -> Path:
    """The file of the checksums of `path`."""
    return path.with_name(path.name + ".sums")


def checksum(line: bytes) -> bytes:
    """The entry of a line, given without its end."""
    return b"%08x\n" % zlib.crc32(line)


class LineSums:
    """Compares the lines of a file with their checksums one by one, where there are any.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        sums = sums_path(path)
        self._path, self._found = path, sums.read_bytes() if sums.exists() else b""

    def check(self, number: int, line: bytes) -> None:
        """Compare one line.

        Args:
            number: from 1.
            line: without its end.

        Raises:
            UsageError: the line was changed.
        """
        own = self._found[(number - 1) * WIDTH : number * WIDTH]
        if len(own) == WIDTH and checksum(line) != own:
            raise UsageError(
                f"{self._path}, line {number}: not as it was written (checksum); restore the file, or pass another "
                "--out"
            )

    def end(self, count: int, torn: bool) -> None:
        """Compare the number of whole lines.

        Args:
            count: of whole lines.
            torn: an incomplete last line was left out.

        Raises:
            UsageError: lines are missing.
        """
        written = len(self._found) // WIDTH
        if written > count + torn:
            raise UsageError(
                f"{self._path} holds {count} lines, and {written} were written: restore the file, or pass another --out"
            )


class Appender:
    """Appends lines to a file, and their checksums to the file beside it; a line is written whole or not at all.

    Args:
        path: of the file; its lines so far have passed `LineSums`.
        sums: the entries of those lines.
    """

    def __init__(self, path: Path, sums: bytes) -> None:
        self._lines, self._sums = (self._open(p) for p in (path, sums_path(path)))
        if sums_path(path).read_bytes() != sums:
            os.ftruncate(self._sums, 0)
            _write(self._sums, sums)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)

    def append(self, line: bytes) -> None:
        """Append a line, given without its end.

        Raises:
            OSError: there is no room for it; the file is as it was.
        """
        size = os.fstat(self._lines).st_size
        _write(self._lines, line + b"\n")
        try:
            _write(self._sums, checksum(line))
        except OSError:
            os.ftruncate(self._lines, size)
            raise

    def sync(self) -> None:
        """Have all that was appended on the disk."""
        for descriptor in (self._lines, self._sums):
            os.fsync(descriptor)

    def close(self) -> None:
        """Close both files after `sync`; further calls have no effect."""
        if self._lines < 0:
            return
        try:
            self.sync()
        finally:
            for descriptor in (self._lines, self._sums):
                os.close(descriptor)
            self._lines = self._sums = -1


def _write(descriptor: int, content: bytes) -> None:
    """Write all of `content` at the end of a file, or nothing."""
    size = os.fstat(descriptor).st_size
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
