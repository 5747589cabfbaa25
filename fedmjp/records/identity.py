"""What tells the rows of a log apart: 16 bytes for each, so that a million of them are compared in little memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attacks.registry import UsageError

WIDTH = 16  # bytes
_EXACT = json.JSONEncoder(sort_keys=True, allow_nan=False)


def identity(row: Mapping[str, Any], names: Sequence[str]) -> bytes:
    """A digest of the values of `names`: the same for rows that are the same once they are written."""
    try:
        text = _EXACT.encode([row[name] for name in names])
    except (TypeError, ValueError):  # not what JSON holds: scalars of NumPy or torch, numbers that are not finite
        text = _EXACT.encode([jsonable(row[name]) for name in names])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=WIDTH).digest()


def require_distinct(identities: bytes | bytearray, path: Path) -> None:
    """Refuse rows that are there twice, so that results would count twice.

    Args:
        identities: of the rows of a file, one after the other.
        path: of the file.

    Raises:
        UsageError: two are equal; the message names their lines.
    """
    halves = np.frombuffer(identities, dtype=np.uint64).reshape(-1, 2)
    first = np.sort(halves[:, 0])
    if not (first[1:] == first[:-1]).any():
        return
    order = np.lexsort(halves.T)  # stable: of equal ones, the earlier line comes first
    equal = np.flatnonzero((halves[order[1:]] == halves[order[:-1]]).all(axis=1))
    if len(equal):
        again = equal[order[equal + 1].argmin()]
        raise UsageError(
            f"{path}, line {order[again + 1] + 1}: the same row as line {order[again] + 1}, as where two runs wrote to "
            "one file; run again with another --out"
        )


def jsonable(value: Any) -> Any:
    """The value as it is after it was written to JSON; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
