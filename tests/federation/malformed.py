"""Replies that no honest client sends.

`MALFORMED` changes a good reply's content in place; `LIES` are finite values in place of an array's own, which pass
every check.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

Change = Callable[[RecordDict, np.random.Generator], None]


def copy_of(content: RecordDict) -> RecordDict:
    """A reply whose records can be changed without those of `content`."""
    return RecordDict({name: type(record)(dict(record.items())) for name, record in content.items()})


def as_npy(values: np.ndarray) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def header(shape: tuple[int, ...], kind: str = "<f4") -> bytes:
    """The header of a .npy file, without data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def array(values: np.ndarray, data: bytes | None = None) -> Array:
    """A Flower array that holds `data`, by default the values' own."""
    shape = tuple(values.shape)
    return Array(str(values.dtype), shape, "numpy.ndarray", as_npy(values) if data is None else data)


def values_of(content: RecordDict) -> np.ndarray:
    """A copy of the update's parameters."""
    return content["update"]["parameters"].numpy().copy()


def put(content: RecordDict, values: np.ndarray, data: bytes | None = None) -> None:
    """Replace the update's parameters."""
    content["update"] = ArrayRecord({"parameters": array(values, data), "buffers": content["update"]["buffers"]})


def with_entry(value: float) -> Change:
    """One entry anywhere is `value`."""

    def change(content: RecordDict, generator: np.random.Generator) -> None:
        """See above."""
        values = values_of(content)
        values.flat[generator.integers(values.size)] = value
        put(content, values)

    return change


def with_values(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """The parameters are `change` of the good ones."""
    return lambda content, _: put(content, change(values_of(content)))


def with_bytes(make: Callable[[bytes, np.random.Generator], bytes]) -> Change:
    """The parameters' bytes are `make` of the good ones."""

    def change(content: RecordDict, generator: np.random.Generator) -> None:
        """See above."""
        values = values_of(content)
        put(content, values, make(as_npy(values), generator))

    return change


def with_metrics(**changed: object) -> Change:
    """The metrics are these instead of the good ones; None leaves an entry out."""

    def change(content: RecordDict, _: np.random.Generator) -> None:
        """See above."""
        found = dict(content["metrics"].items()) | {n.replace("_", "-"): v for n, v in changed.items()}
        content["metrics"] = MetricRecord({n: v for n, v in found.items() if v is not None})

    return change


def with_arrays(**changed: np.ndarray | None) -> Change:
    """The update has these arrays more, or lacks those that are None."""

    def change(content: RecordDict, _: np.random.Generator) -> None:
        """See above."""
        found = dict(content["update"].items())
        found |= {name: None if values is None else array(values) for name, values in changed.items()}
        content["update"] = ArrayRecord({name: own for name, own in found.items() if own is not None})

    return change


def flipped(data: bytes, generator: np.random.Generator) -> bytes:
    """One byte of the header is another one."""
    place = int(generator.integers(10, 60))
    return data[:place] + bytes([data[place] ^ (1 + int(generator.integers(255)))]) + data[place + 1 :]


MALFORMED: dict[str, Change] = {
    "shorter": with_values(lambda v: v[:-1]),
    "longer": with_values(lambda v: np.concatenate([v, v[:7]])),
    "empty": with_values(lambda v: v[:0]),
    "two dimensions": with_values(lambda v: v[None]),
    "float64": with_values(lambda v: v.astype(np.float64)),
    "float16": with_values(lambda v: v.astype(np.float16)),
    "integers": with_values(lambda v: v.astype(np.int32)),
    "complex": with_values(lambda v: v.astype(np.complex64)),
    "big-endian": with_values(lambda v: v.astype(">f4")),
    "one NaN": with_entry(np.nan),
    "one infinity": with_entry(np.inf),
    "both infinities": lambda c, g: (with_entry(np.inf)(c, g), with_entry(-np.inf)(c, g)),
    "all NaN": with_values(lambda v: v * np.nan),
    "no bytes": with_bytes(lambda data, _: b""),
    "random bytes": with_bytes(lambda data, g: g.bytes(len(data))),
    "cut": with_bytes(lambda data, g: data[: int(g.integers(len(data)))]),
    "more bytes than the header says": with_bytes(lambda data, _: data + b"\0" * 64),
    "a header of 10^13 values": with_bytes(lambda data, _: header((10**13,)) + b"\0" * 64),
    "a header without end": with_bytes(lambda data, _: b"\x93NUMPY\x01\x00\xff\xff{'shape': (" + b"(" * 5000),
    "a header with negative shape": with_bytes(lambda data, _: header((-1,)) + data[128:]),
    "pickled objects": with_bytes(lambda data, _: header((1,), "|O") + pickle.dumps([1])),
    "no parameters": with_arrays(parameters=None),
    "no buffers": with_arrays(buffers=None),
    "another array": with_arrays(other=np.ones(10, np.float32)),
    "buffers of another length": with_arrays(buffers=np.full(3, np.nan, np.float32)),
    "no update": lambda content, _: content.pop("update"),
    "no metrics": lambda content, _: content.pop("metrics"),
    "no number of examples": with_metrics(num_examples=None),
    "no loss": with_metrics(train_loss=None),
    "no examples": with_metrics(num_examples=0),
    "negative examples": with_metrics(num_examples=-1000),
    "10^18 examples": with_metrics(num_examples=10**18),
    "half an example": with_metrics(num_examples=0.5),
    "NaN examples": with_metrics(num_examples=float("nan")),
    "a list of examples": with_metrics(num_examples=[1, 2]),
    "NaN loss": with_metrics(train_loss=float("nan")),
}


def with_array(change: Change, arrays: ArrayRecord, name: str, generator: np.random.Generator) -> ArrayRecord:
    """Arrays of a user's own app, of which `name` is changed as `change` does it to our update's parameters."""
    own = ArrayRecord({"parameters": arrays[name], "buffers": arrays[name]})
    content = RecordDict({"update": own, "metrics": MetricRecord({"num-examples": 1, "train-loss": 1.0})})
    change(content, generator)
    update = content.get("update", {})
    others = {n: array for n, array in arrays.items() if n != name}
    return ArrayRecord(others | {name if n == "parameters" else n: a for n, a in update.items() if n != "buffers"})


Lie = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def with_noise(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Noise of 1, 10 or 100 % of the mean size of an entry."""
    return values + generator.standard_normal(values.shape) * np.abs(values).mean() * generator.choice([0.01, 0.1, 1.0])


def with_one_wrong(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """One entry is 10^4 times the largest."""
    found = values.copy()
    found.flat[generator.integers(found.size)] = 1e4 * np.abs(values).max()
    return found


LIES: dict[str, Lie] = {
    "honest": lambda v, _: v,
    "scaled": lambda v, g: v * g.choice([1e-3, 0.5, 2.0, 1e3]),
    "negated": lambda v, _: -v,
    "noise": with_noise,
    "random": lambda v, g: g.standard_normal(v.shape),
    "zeros": lambda v, _: np.zeros_like(v),
    "shuffled": lambda v, g: g.permutation(v.ravel()).reshape(v.shape),
    "rolled": lambda v, g: np.roll(v.ravel(), g.integers(1, 100)).reshape(v.shape),
    "huge": lambda v, _: v * 1e20,
    "denormal": lambda v, _: np.full_like(v, 1e-42),
    "constant": lambda v, _: np.full_like(v, v.mean()),
    "float16": lambda v, _: v.astype(np.float16),
    "one wrong entry": with_one_wrong,
    "largest numbers": lambda v, _: np.full_like(v, np.finfo(np.float32).max),
}
