"""A data frame built from rows that are read one by one: numbers as arrays, equal values of a column held once.

A million rows of results are 1.3 GB of JSON. As Python objects they would take more; here a number takes 8 bytes, and
the text and parameters that rows share take a pointer, or as a category one to four bytes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

MOST_SHARED = 1000  # different values of a column that are looked for among those read before
LARGEST = 2**63  # of whole numbers in 64 bits
AT_ONCE = 256  # rows that are held as Python objects


def build_frame(rows: Iterable[Mapping[str, Any]], names: Sequence[str], *, categories: bool = False) -> pd.DataFrame:
    """The columns `names` of rows, with the types that pandas gives to lists of their values.

    Args:
        rows: each with a value for every name.
        names: of the columns.
        categories: columns of text become categories, in order of first appearance.
    """
    columns = {name: _Column(categories) for name in names}
    remaining = iter(rows)
    while some := list(islice(remaining, AT_ONCE)):
        for name, column in columns.items():
            column.add([row[name] for row in some])
    found = {}
    for name in names:
        found[name] = columns.pop(name).finish()
    return pd.DataFrame(found, columns=list(names), copy=False)


class _Column:
    """The values of one column so far, in parts: whole numbers (q), numbers (d), codes of text (i), or the values."""

    def __init__(self, categories: bool) -> None:
        self._categories = categories
        self._parts: list[array | list[Any]] = []
        self._known: dict[str, Any] = {}
        self._codes: dict[str, int] = {}

    def add(self, values: list[Any]) -> None:
        """Append some values, as JSON holds them."""
        kinds = set(map(type, values))
        if kinds == {int}:
            self._extend("q" if min(values) >= -LARGEST and max(values) < LARGEST else "", values)
        elif kinds & {int, float} and kinds <= {int, float, type(None)}:
            self._extend("d", [math.nan if value is None else value for value in values])
        elif kinds == {str} and self._categories:
            codes = self._codes
            self._extend("i", [codes.setdefault(value, len(codes)) for value in values])
        elif kinds == {str} and len(self._known) < MOST_SHARED:
            self._extend("", [self._known.setdefault(value, value) for value in values])
        elif kinds == {str}:
            self._extend("", [self._known.get(value, value) for value in values])
        else:
            self._extend("", [_shared(value, self._known) for value in values])

    def _extend(self, kind: str, values: list[Any]) -> None:
        """Lengthen the last part if it is of this kind (many short arrays would leave gaps in memory)."""
        if not self._parts or _kind(self._parts[-1]) != kind:
            self._parts.append(array(kind) if kind else [])
        self._parts[-1].extend(values)

    def finish(self) -> Any:
        """All values, as a column of a data frame."""
        kinds = set(map(_kind, self._parts))
        if kinds == {"i"}:
            return pd.Categorical.from_codes(np.frombuffer(self._parts[0], dtype=np.intc), categories=list(self._codes))
        if kinds in ({"q"}, {"d"}):
            return np.frombuffer(self._parts[0], dtype=kinds.pop())
        absent = all(value is None for part in self._parts if isinstance(part, list) for value in part)
        if absent and kinds & {"q", "d"} and "i" not in kinds:
            return np.concatenate([np.array(part, dtype=float) for part in self._parts])
        words = list(self._codes)
        values = []
        for part in self._parts:
            values += [words[code] for code in part] if _kind(part) == "i" else part
        self._parts.clear()
        return pd.Series(values)  # at once, so that no column is there as a list and as an array while others are read


def _kind(part: array | list[Any]) -> str:
    return part.typecode if isinstance(part, array) else ""


def _shared(value: Any, known: dict[str, Any]) -> Any:
    """An equal value of the column that was read before, so that a million rows hold one copy of their parameters.

    Args:
        known: the column's values so far, of which about `MOST_SHARED` are kept: a column of values that are all
            different gains nothing.
    """
    if not isinstance(value, (str, dict, list)):
        return value
    key = value if isinstance(value, str) else repr(value)
    return known.setdefault(key, value) if key in known or len(known) < MOST_SHARED else value
