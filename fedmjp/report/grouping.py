"""Groups of rows, one at a time and with the columns that are asked for: a copy of a group is all that is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd


def each_group(
    rows: pd.DataFrame, by: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The groups of rows that agree in `by`, in order of first appearance, with the values of `by`.

    Args:
        rows: with the columns `by`; rows without a value there are in no group.
        columns: of the groups' frames, as far as `rows` has them; None for all.
    """
    numbers = rows.groupby(list(by), sort=False, observed=True).ngroup().to_numpy()
    kept = rows if columns is None else rows[[name for name in columns if name in rows]]
    for number, first in zip(*np.unique(numbers, return_index=True), strict=True):
        if number >= 0:
            yield tuple(rows[name].iloc[first] for name in by), kept[numbers == number]
