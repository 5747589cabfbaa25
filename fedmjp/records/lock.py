"""One writer for a folder of results: a second process is refused instead of doubling the rows.

The lock is the operating system's (`flock`) on the folder itself, so that it leaves no file behind and ends with its
process, however that ends. Several logs of one process may write to one folder. On systems without `flock` (Windows)
there is no lock.
"""

from __future__ import annotations

import os
from pathlib import Path

from attacks.registry import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_held: dict[Path, tuple[int, int]] = {}  # folder -> (its file descriptor, how many locks of this process hold it)


def leave_to_parent() -> None:
    """In a forked process: let go of the parent's locks, which otherwise outlive a parent that is killed."""
    for descriptor, _ in _held.values():
        if fcntl is not None:
            os.close(descriptor)  # the lock is the parent's own as long as its copy is open
    _held.clear()


class FolderLock:
    """Holds a folder for this process until `release`.

    Args:
        folder: an existing folder.

    Raises:
        UsageError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Path | None = folder.resolve()
        descriptor, count = _held.get(self._folder, (-1, 0))
        if not count and fcntl is not None:
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise UsageError(
                    f"another process is writing to {folder}; wait until it ends, or pass another --out"
                ) from None
        _held[self._folder] = descriptor, count + 1

    def release(self) -> None:
        """Let go of the folder; further calls have no effect."""
        if self._folder is None:
            return
        descriptor, count = _held.pop(self._folder)
        if count > 1:
            _held[self._folder] = descriptor, count - 1
        elif fcntl is not None:
            os.close(descriptor)
        self._folder = None
