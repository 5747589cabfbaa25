"""Files that are whole or not there: written beside their place, flushed to the disk, then moved; with a digest.

A process may be killed and a machine may lose power at any moment, a disk may be full and a bit may flip. What a run is
resumed from is therefore written by these functions only: the old content stays until the new one is on the disk, and a
file whose content is not what was written is refused by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacks.registry import UsageError

MARK = "fedmjp"  # first entry of a sealed file's first line
DIGEST = "digest"  # of a record in JSON


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and have it on the disk before this returns.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; the old file is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk; no effect where a folder cannot be opened (Windows)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_sealed(path: Path, content: bytes, about: Mapping[str, Any] | None = None) -> None:
    """Write `content` behind a line with its SHA-256 digest.

    Args:
        about: small values kept in that line, as JSON has them.
    """
    write_whole(path, _head(content, about or {}) + b"\n" + content)


def read_sealed(path: Path, advice: str) -> tuple[bytes, dict[str, Any]]:
    """(content, about) of a file that `write_sealed` wrote.

    Args:
        advice: what to do where it is damaged, as the end of a message.

    Raises:
        UsageError: it cannot be read, was cut short, or is not as it was written.
    """
    try:
        head, newline, content = path.read_bytes().partition(b"\n")
        about = json.loads(head)["about"] if newline else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: its first line is none of FedMJP's; {advice}") from error
    if about is None or _head(content, about) != head:
        raise UsageError(f"{path} is damaged: it is not as it was written (digest); {advice}")
    return content, about


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as indented JSON with its digest as the last entry."""
    content = {name: value for name, value in record.items() if name != DIGEST}
    plain = json.loads(json.dumps(content, default=str))
    write_whole(path, (json.dumps(plain | {DIGEST: _digest_of(plain)}, indent=2) + "\n").encode())


def read_record(path: Path, advice: str = "restore it, or pass another --out") -> dict[str, Any]:
    """A record of `write_record` without its digest; records from before there was one have none.

    Raises:
        UsageError: it cannot be read, or is not as it was written.
    """
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({type(error).__name__}); {advice}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{path} is damaged: it holds no record; {advice}")
    wanted = record.pop(DIGEST, None)
    if wanted is not None and wanted != _digest_of(record):
        raise UsageError(f"{path} is damaged: it is not as it was written (digest); {advice}")
    return record


def _head(content: bytes, about: Mapping[str, Any]) -> bytes:
    """The first line of a sealed file, without its end."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() + b"\n" + content).hexdigest()
    return json.dumps({MARK: 1, "sha256": digest, "about": dict(about)}).encode()


def _digest_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
