"""Arrays in messages that somebody else has sent: a header is checked before anything of its size is made.

Flower's arrays are the bytes of a .npy file. `numpy.load` makes an array of the size that the header claims, and only
then finds out that the bytes are not there. Reading needs no Flower.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.registry import UsageError

LONGEST_HEADER = 1024  # bytes; those of numpy's own arrays of numbers have 128
MOST_WORDS = 200  # characters of a parser's message


def read_npy(data: bytes) -> np.ndarray:
    """The array as a view of the bytes, not to be written to.

    Raises:
        ValueError: the bytes are no .npy of numbers (or strings), or hold another number of values than their header
            says; one line.
    """
    try:
        stream = io.BytesIO(data[:LONGEST_HEADER])
        version = np.lib.format.read_magic(stream)
        first = stream.tell() + (2 if version == (1, 0) else 4)  # behind the field that holds the header's length
        length = int.from_bytes(data[stream.tell() : first], "little")
        shape, fortran, dtype = _read_header(version, bytes(data[stream.tell() : min(first + length, LONGEST_HEADER)]))
    except Exception as error:  # the header's parser raises whatever a malformed header leads it to
        words = str(error).splitlines() or [type(error).__name__]
        raise ValueError(words[0][:MOST_WORDS]) from error
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    start = first + length
    if min(shape, default=0) < 0 or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not hold an array of the shape {str(shape)[:MOST_WORDS]}")
    if not math.prod(shape) * dtype.itemsize:
        return np.empty(shape, dtype)
    values = np.frombuffer(data, dtype=dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


@lru_cache(maxsize=64)
def _read_header(version: tuple[int, int], header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, Fortran order, type) from a header's length and text; the arrays of a federation have few headers."""
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(io.BytesIO(header))


def tensors_of(message: Mapping) -> dict[str, Tensor]:
    """The arrays of all records of a message by name, whatever the records are called, as copies.

    Raises:
        UsageError: one of them is no array of numbers.
    """
    records = (record for record in message.values() if isinstance(record, Mapping))
    arrays = ((name, array) for record in records for name, array in record.items() if hasattr(array, "numpy"))
    return {name: _tensor(name, array) for name, array in arrays}


def _tensor(name: str, array: Any) -> Tensor:
    data = getattr(array, "data", None)
    try:
        return torch.from_numpy((read_npy(data) if isinstance(data, bytes) else array.numpy()).copy())
    except (TypeError, ValueError) as error:
        raise UsageError(f"the array {name!r} cannot be read: {error}") from error
