"""The rows of a run: a file with one JSON object per line, and one line per image and attack.

The report is computed from this file alone. A run may be killed at any moment and resumed, so the log repairs the only
damage that this can cause (an incomplete last line) and refuses any other damage: lines that are no rows, lines that
were changed (`fedmjp.records.sums`), and rows that are there twice.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from attacks.registry import UsageError
from fedmjp.records.files import write_whole
from fedmjp.records.frame import build_frame
from fedmjp.records.identity import WIDTH, identity, jsonable, require_distinct
from fedmjp.records.lock import FolderLock
from fedmjp.records.sums import Appender, LineSums, checksum, sums_path

METRICS = ("mse", "psnr", "ssim", "fft2d", "fft2d_official", "lpips", "patch_recovery")
# Share of the original's patches that a reconstruction holds in any place (`fedmjp.metrics.any_place`).
ANY_PLACE = "any_place"

# Keys of every row, of an attack or of anything else: what produced it, and on which model and data.
PROVENANCE = (
    "run_id",
    "commit",
    "version",
    "torch_version",
    "seed",
    "device",
    "dataset",
    "model",
    "weights",
)

# What clients do and send.
_CLIENTS = (
    "block",
    "defense",
    "defense_parameters",
    "objective",
    "objective_parameters",
    "setting",
    "precision",
    "update",
    "batch_size",
    "local_steps",
)
ROW_KEYS = (
    *PROVENANCE,
    *_CLIENTS,
    "attack",
    "attack_parameters",
    "threat_model",
    "round",
    "client",
    "image",
    "image_id",
    "gradient_norm",
    *METRICS,
    ANY_PLACE,
    "known",
    "certified",
    "residual",
    "seconds",
    "diagnosis",
    "details",
    "flags",
)
# Keys that a row may lack because it was written before they were introduced, and their default values.
OPTIONAL = {
    "flags": [],
    ANY_PLACE: None,
    "known": None,
    "certified": None,
    "residual": None,
    "objective": "supervised",
    "objective_parameters": {},
}

# The keys that describe what was run, in contrast to its results and the machine. Rows that agree in all of them and in
# the image are the same row.
CASE = (
    "dataset",
    "model",
    "weights",
    *_CLIENTS,
    "seed",
    "threat_model",
    "attack",
    "attack_parameters",
    "round",
    "client",
)
IDENTITY = (*CASE, "image", "image_id")

# Names in the column `attack` of the two baselines that need no gradient.
BASELINES = ("mean_image", "other_image")


@dataclass(frozen=True)
class Schema:
    """The keys of the rows of a log.

    Attributes:
        keys: all keys, in the order of the file.
        identity: the keys that identify a row.
        optional: keys that a row may lack, with their default values.
    """

    keys: tuple[str, ...]
    identity: tuple[str, ...]
    optional: Mapping[str, Any] = field(default_factory=dict)


RESULTS = Schema(ROW_KEYS, IDENTITY, OPTIONAL)


class RowLog:
    """An append-only log of result rows that can be continued after the process was killed.

    Args:
        path: a .jsonl file; it is created with its folders if it does not exist, else read and continued.
        schema: of the rows; by default that of attacks on images.

    Attributes:
        repaired: whether the last line had no line end. If it was incomplete, it was removed; if only the line end was
            missing, it was kept.

    Raises:
        UsageError: a line, other than an incomplete last one, is not a valid row (the message names file and line), or
            another process writes to the folder.
    """

    def __init__(self, path: str | os.PathLike[str], schema: Schema = RESULTS) -> None:
        self.path, self.schema = Path(path), schema
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path.parent)
        try:
            self._read, self._file, self.repaired = self._continue()
        except (UsageError, OSError):
            self._lock.release()
            raise
        self._appended: set[bytes] = set()

    def _continue(self) -> tuple[set[bytes], Appender, bool]:
        """(identities of the rows that are there, the file, whether it was repaired)."""
        identities, sums, whole, last, repaired = bytearray(), bytearray(), 0, None, False
        for line, row in _read(self.path, self.schema) if self.path.exists() else ():
            identities += b"" if row is None else identity(row, self.schema.identity)
            if line.endswith(b"\n"):
                sums += checksum(line[:-1])
                whole += len(line)
            else:
                last, repaired = row, True
        require_distinct(identities, self.path)
        if repaired:
            os.truncate(self.path, whole)
        file = Appender(self.path, bytes(sums))
        if last is not None:
            file.append(_line(last))
        return {bytes(identities[i : i + WIDTH]) for i in range(0, len(identities), WIDTH)}, file, repaired

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write one row and flush the file; NaN and infinities become null.

        A resumed run repeats a batch that was written only in part. Rows that were in the file when it was opened are
        then not written again.

        Args:
            row: a value for each key of the schema; optional keys may be missing.

        Returns:
            Whether the row was written.

        Raises:
            ValueError: keys are missing or unknown, or the row was already appended through this log.
            OSError: there is no room for the row; the file is as it was.
        """
        row = {**self.schema.optional, **row}
        missing = [key for key in self.schema.keys if key not in row]
        unknown = [key for key in row if key not in self.schema.keys]
        if missing or unknown:
            raise ValueError(f"not a results row: missing keys {missing}, unknown keys {unknown}")
        clean = {key: jsonable(row[key]) for key in self.schema.keys}
        own = identity(clean, self.schema.identity)
        if own in self._appended:
            raise ValueError(f"row appended twice: {[clean[key] for key in self.schema.identity]}")
        if own in self._read:
            return False
        self._file.append(_line(clean))
        self._appended.add(own)
        return True

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether the log contains a row with the same identity; other keys of `row` are ignored."""
        own = identity({**self.schema.optional, **row}, self.schema.identity)
        return own in self._read or own in self._appended

    def done(self, case: Mapping[str, Any], image_ids: Sequence[str]) -> bool:
        """Whether the log contains a row for every image of a batch.

        Args:
            case: the values of the keys `CASE`; other keys are ignored.
            image_ids: ids of the images in the order of the batch.
        """
        return all(self.has({**case, "image": i, "image_id": name}) for i, name in enumerate(image_ids))

    def rows(self) -> list[dict[str, Any]]:
        """All rows in their order, read from the file."""
        return [row for _, row in _read(self.path, self.schema) if row is not None]

    def sync(self) -> None:
        """Have all rows on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file and let go of its folder; further calls have no effect."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pack_rows(path: Path) -> Path:
    """Replace a finished rows file by a compressed one; equal rows give equal bytes.

    Returns:
        Path of the compressed file, PATH.gz.
    """
    packed = _pack(path.read_bytes(), path)
    path.unlink()
    sums_path(path).unlink(missing_ok=True)
    return packed


def join_rows(parts: Sequence[Path], path: Path, schema: Schema = RESULTS) -> Path:
    """Write the rows of several finished files, each line checked, as one compressed file, whole or not at all.

    Returns:
        Path of the compressed file, PATH.gz.

    Raises:
        UsageError: a line is damaged; the message names it.
    """
    return _pack(b"".join(line for part in parts for line, _ in _read(part, schema)), path)


def replace_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write these rows in place of those of a closed log."""
    sums_path(path).unlink(missing_ok=True)  # first: rows without checksums are read, other rows than theirs are not
    write_whole(path, b"".join(_line(row) + b"\n" for row in rows))


def _pack(lines: bytes, path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    write_whole(packed, gzip.compress(lines, mtime=0))
    return packed


def unpack_rows(path: Path) -> None:
    """Undo `pack_rows` if there is a compressed file and no uncompressed one; `path` is that of the latter.

    Where an interrupted run left both, the uncompressed one goes on from the compressed one, and is kept.

    Raises:
        UsageError: the compressed file is damaged, or holds rows that the other lacks: packing would lose them.
    """
    packed = path.with_name(path.name + ".gz")
    if not packed.exists():
        return
    rows = _decompressed(packed)
    if not path.exists():
        write_whole(path, rows)
        sums_path(path).unlink(missing_ok=True)
    elif not path.read_bytes().startswith(rows):
        raise UsageError(f"{path} does not go on from {packed.name}, whose rows would be lost; move one of them away")


def load_rows(
    path: str | os.PathLike[str],
    schema: Schema = RESULTS,
    *,
    columns: Sequence[str] | None = None,
    categories: bool = False,
) -> pd.DataFrame:
    """Read a results file (.jsonl, or .jsonl.gz) without changing it; an incomplete last line is left out.

    Args:
        path: of the file.
        schema: of its rows.
        columns: keys of the schema to keep; None for all. Every line is checked in any case.
        categories: text becomes pandas categories, which take a fraction of the memory.

    Returns:
        One row per line with the schema's keys as columns. Metrics, `any_place`, `residual`, `seconds` and
        `gradient_norm` are float64 with NaN for null; dictionaries and lists stay Python objects, of which equal ones
        are mostly one and the same.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no results file {path}; run a benchmark first or name its output folder")
    names = [name for name in schema.keys if columns is None or name in columns]
    frame = build_frame(_distinct(path, schema), names, categories=categories)
    numbers = [name for name in (*METRICS, ANY_PLACE, "residual", "seconds", "gradient_norm") if name in names]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def distinct(values: pd.Series) -> list[Any]:
    """The objects of a column, each once, in order of first appearance; equal ones may be several objects."""
    return list({id(value): value for value in values}.values())


def _read(path: Path, schema: Schema) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file one by one with their rows; only an incomplete last line may have none."""
    sums, number, torn = LineSums(path), 0, False
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                row, torn = _row(line, schema), not line.endswith(b"\n")
                number += not torn
                if row is None and not torn:
                    raise _damaged(path, number)
                if not torn:
                    sums.check(number, line[:-1])
                yield line, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:  # gzip has a checksum of its own
        raise _damaged_gzip(path, error) from error
    sums.end(number, torn)


def _damaged(path: Path, number: int) -> UsageError:
    return UsageError(f"{path}, line {number}: not a results row; restore or delete that line")


def _row(line: bytes, schema: Schema) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the base class of JSONDecodeError and UnicodeDecodeError
        return None
    row = {**schema.optional, **row} if isinstance(row, dict) else {}
    return {key: row[key] for key in schema.keys} if set(row) == set(schema.keys) else None


def _distinct(path: Path, schema: Schema) -> Iterator[dict[str, Any]]:
    """The rows of a file one by one, without an incomplete last line.

    Raises:
        UsageError: two rows are the same.
    """
    identities = bytearray()
    for _, row in _read(path, schema):
        if row is not None:
            identities += identity(row, schema.identity)
            yield row
    require_distinct(identities, path)


def _decompressed(packed: Path) -> bytes:
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged_gzip(packed, error) from error


def _damaged_gzip(packed: Path, error: Exception) -> UsageError:
    return UsageError(f"{packed} is damaged ({type(error).__name__}); restore it, or pass another --out")


def _line(row: Mapping[str, Any]) -> bytes:
    # A file name that is not UTF-8 holds surrogates, which become their JSON escapes.
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
