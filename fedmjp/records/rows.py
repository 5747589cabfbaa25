"""The rows of a run: one JSON object a line, one line per image and attack.

Everything the report says is computed from this file and from nothing else. A run may be killed at any moment and
taken up again, so the log repairs the one kind of damage that a kill can do (a last line cut short) and refuses every
other kind.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from attacks.registry import UsageError

METRICS = ("mse", "psnr", "ssim", "fft2d", "fft2d_official", "lpips", "patch_recovery")

ROW_KEYS = (
    "run_id",
    "commit",
    "version",
    "torch_version",
    "seed",
    "device",
    "dataset",
    "model",
    "weights",
    "block",
    "defense",
    "defense_parameters",
    "setting",
    "precision",
    "update",
    "batch_size",
    "local_steps",
    "attack",
    "attack_parameters",
    "threat_model",
    "round",
    "client",
    "image",
    "image_id",
    "gradient_norm",
    *METRICS,
    "seconds",
    "diagnosis",
    "details",
    "flags",
)
# What a row may leave out, as rows written before the key was known do.
OPTIONAL = {"flags": []}

# What was asked, as opposed to what was measured and where: rows that agree in all of it are the same row.
CASE = (
    "dataset",
    "model",
    "weights",
    "block",
    "defense",
    "defense_parameters",
    "setting",
    "precision",
    "update",
    "batch_size",
    "local_steps",
    "seed",
    "threat_model",
    "attack",
    "attack_parameters",
    "round",
    "client",
)
IDENTITY = (*CASE, "image", "image_id")

# Gradient-free answers every attack has to beat: they are rows like any other, filed under these attack names.
BASELINES = ("mean_image", "other_image")


@dataclass(frozen=True)
class Schema:
    """What the rows of a log hold.

    Attributes:
        keys: every key, in the order of the file.
        identity: keys that tell rows apart.
        optional: what a row may leave out, and what it then counts for.
    """

    keys: tuple[str, ...]
    identity: tuple[str, ...]
    optional: Mapping[str, Any] = field(default_factory=dict)


RESULTS = Schema(ROW_KEYS, IDENTITY, OPTIONAL)


class RowLog:
    """An append-only log of result rows that survives being killed.

    Args:
        path: a .jsonl file; made with its folders if it does not exist, read and continued if it does.
        schema: of the rows; those of attacks on images by default.

    Attributes:
        repaired: the file ended in a line without its line end. A half-written row was cut off; a whole row that
            lacked only its line end was kept.

    Raises:
        UsageError: a line other than a half-written last one is no row; the message names the file and the line.
    """

    def __init__(self, path: str | os.PathLike[str], schema: Schema = RESULTS) -> None:
        self.path, self.schema = Path(path), schema
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        self._rows, self.repaired = _parse(content, self.path, schema)
        if self.repaired:
            _rewrite(self.path, self._rows)
        self._read = {_key(row, schema.identity) for row in self._rows}
        self._appended: set[str] = set()
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write one row and flush it; NaN and infinities become null. What the schema has as optional may be left out.

        A resumed run repeats a batch that was only partly written: images already in the file when it was opened are
        then left as they are.

        Returns:
            whether the row was written.

        Raises:
            ValueError: keys missing or unknown, or the row was already appended through this log.
        """
        row = {**self.schema.optional, **row}
        missing = [key for key in self.schema.keys if key not in row]
        unknown = [key for key in row if key not in self.schema.keys]
        if missing or unknown:
            raise ValueError(f"not a results row: missing keys {missing}, unknown keys {unknown}")
        clean = {key: _jsonable(row[key]) for key in self.schema.keys}
        identity = _key(clean, self.schema.identity)
        if identity in self._appended:
            raise ValueError(f"row appended twice: {identity}")
        if identity in self._read:
            return False
        self._file.write(_line(clean))
        self._file.flush()
        self._appended.add(identity)
        self._rows.append(clean)
        return True

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a row with this identity is in the log; keys outside the identity are ignored."""
        key = _key(row, self.schema.identity)
        return key in self._read or key in self._appended

    def done(self, case: Mapping[str, Any], image_ids: Sequence[str]) -> bool:
        """Whether every image of a batch has its row.

        Args:
            case: the values of `CASE`; other keys are ignored.
            image_ids: of the batch, in its order.
        """
        return all(self.has({**case, "image": i, "image_id": name}) for i, name in enumerate(image_ids))

    def rows(self) -> list[dict[str, Any]]:
        """All rows, those read at the opening first; a new list of the log's own dictionaries."""
        return list(self._rows)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pack_rows(path: Path) -> Path:
    """Replace a finished rows file by its compressed self, PATH.gz: equal rows give equal bytes."""
    packed = path.with_name(path.name + ".gz")
    draft = packed.with_name(packed.name + ".part")
    draft.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    draft.replace(packed)
    path.unlink()
    return packed


def unpack_rows(path: Path) -> None:
    """Undo `pack_rows`, where there is a packed file and no plain one."""
    packed = path.with_name(path.name + ".gz")
    if packed.exists() and not path.exists():
        draft = path.with_name(path.name + ".part")
        draft.write_bytes(gzip.decompress(packed.read_bytes()))
        draft.replace(path)


def load_rows(path: str | os.PathLike[str], schema: Schema = RESULTS) -> pd.DataFrame:
    """Read a results file (.jsonl, or .jsonl.gz) without changing it; a half-written last line is left out.

    Returns:
        one row per line with the schema's keys as columns. Metrics, `seconds` and `gradient_norm` are float64 with NaN
        for null; dictionaries and lists stay Python objects.

    Raises:
        UsageError: no such file, or a damaged line (named).
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no results file {path}; run a benchmark first or name its output folder")
    content = path.read_bytes()
    rows, _ = _parse(gzip.decompress(content) if path.suffix == ".gz" else content, path, schema)
    frame = pd.DataFrame(rows, columns=list(schema.keys))
    numbers = [name for name in (*METRICS, "seconds", "gradient_norm") if name in schema.keys]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _key(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return json.dumps([_jsonable(row[name]) for name in names], sort_keys=True)


def _parse(content: bytes, path: Path, schema: Schema) -> tuple[list[dict[str, Any]], bool]:
    *lines, tail = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line, schema)
        if row is None:
            raise UsageError(f"{path}, line {number}: not a results row; restore or delete that line")
        rows.append(row)
    last = _row(tail, schema)
    return rows + ([last] if last is not None else []), bool(tail)


def _row(line: bytes, schema: Schema) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError both are
        return None
    row = {**schema.optional, **row} if isinstance(row, dict) else {}
    return {key: row[key] for key in schema.keys} if set(row) == set(schema.keys) else None


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    # Through a second file: a kill during the repair must not cost the rows that were whole.
    draft = path.with_name(path.name + ".part")
    draft.write_text("".join(map(_line, rows)), encoding="utf-8")
    draft.replace(path)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
