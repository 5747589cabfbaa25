"""What is rendered from a results folder: files from its rows, Markdown blocks from its tables, figures.

Commands write their tables through the same objects that `benchmarks/render.py` checks the committed ones with, so that
a committed table is always what its rows give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attacks.registry import UsageError
from fedmjp.audit.verdict import RECOGNISABLE, judge
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.files import read_record, write_whole
from fedmjp.records.rows import RESULTS, Schema, load_rows
from fedmjp.report.blocks import markdown_table as markdown_table
from fedmjp.report.columns import check_columns

# Columns that tell what was attacked apart: a batch may hold several views of one photograph.
PICTURE = ["image_id", "image"]


@dataclass(frozen=True)
class Rendering:
    """What is made of one results folder.

    Attributes:
        folder: below results/.
        files: from the folder to the content of each file that follows from its rows.
        blocks: name -> from the folder to the text of a Markdown block, `<!-- NAME -->` ... `<!-- /NAME -->`.
        figures: draws the figures that need nothing but the folder into it.
    """

    folder: str
    files: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    blocks: Mapping[str, Callable[[Path], str]] = field(default_factory=dict)
    figures: Callable[[Path], None] = lambda folder: None

    def write(self, folder: Path) -> None:
        """Write files and figures of a folder, wherever it is."""
        for name, text in self.files(folder).items():
            write_whole(folder / name, text.encode())
        self.figures(folder)


def read_rows(folder: Path, schema: Schema = RESULTS) -> pd.DataFrame:
    """The rows of a results folder, packed or not.

    Raises:
        UsageError: no rows, or damaged ones.
    """
    packed = folder / "rows.jsonl.gz"
    return load_rows(packed if packed.exists() else folder / "rows.jsonl", schema)


def read_one_seed(folder: Path, schema: Schema = RESULTS, seed: int | None = None) -> pd.DataFrame:
    """`read_rows`, of a table that counts every row as an image: the same image under another seed is none.

    Args:
        seed: the one that the rows must be of; None for any.

    Raises:
        UsageError: see `read_rows`, or the rows are of several seeds or another one.
    """
    rows = read_rows(folder, schema)
    seeds = sorted({*rows["seed"].unique(), *([] if seed is None else [seed])})
    if len(seeds) > 1:
        raise UsageError(
            f"the table of {folder} counts images under one seed, not {' and '.join(map(str, seeds))}; give each seed "
            "a folder of its own (--out)"
        )
    return rows


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a results folder.

    Raises:
        UsageError: there is none.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError(f"no {path}; run the command that writes it first")
    return read_record(path)


def spread_table(rows: pd.DataFrame, by: list[str], value: str = "psnr") -> pd.DataFrame:
    """Mean with 95 % interval, median, first decile (dB) and share of images above `RECOGNISABLE` dB, by `by`.

    Mean and interval are over images, each with its mean over seeds; median and first decile are over all answers. No
    answer is not above: the share is over all rows.

    Args:
        rows: with the columns `by`, `value` (dB), `seconds`, `seed` and `PICTURE`.

    Returns:
        The columns `by`, for V the name of the value V_mean, V_low, V_high, V_median, V_first_decile and
        V_share_recognisable, `seconds_median`, `count` (of images), `failed` (of them, without any answer) and `seeds`.
    """
    lines = []
    for key, group in rows.groupby(by, sort=False):
        values = group[value].to_numpy()
        images = group.groupby(PICTURE, sort=False)[value].mean().to_numpy()
        interval = bootstrap_mean(images)
        finite = values[np.isfinite(values)]
        spread = np.quantile(finite, [0.5, 0.1]) if len(finite) else (np.nan, np.nan)
        good = float((finite > RECOGNISABLE).sum() / len(values))
        numbers = {"mean": interval.mean, "low": interval.low, "high": interval.high, "median": spread[0]}
        numbers |= {"first_decile": spread[1], "share_recognisable": good}
        named = {f"{value}_{name}": number for name, number in numbers.items()}
        other = {"seconds_median": group["seconds"].median(), "count": len(images)}
        other |= {"failed": len(images) - interval.count, "seeds": group["seed"].nunique()}
        lines.append(dict(zip(by, key, strict=True)) | named | other)
    return pd.DataFrame(lines)


def answered(line: Mapping[str, Any] | pd.Series) -> str:
    """What follows a figure that is over answers alone: " (4 of 8)" where of 8 images 4 were answered, "" for all.

    Args:
        line: with the columns `count` and `failed`.
    """
    return f" ({line['count'] - line['failed']:.0f} of {line['count']:.0f})" if line["failed"] else ""


def verdict_columns(rows: pd.DataFrame, images: int) -> dict[str, Any]:
    """The verdict on one line of a table, by column: answer, attack, psnr_median, gain_mean, _low and _high, recovered,
    certified, count.

    Args:
        rows: of the line, as `load_rows` gives them.
        images: that the line is of.
    """
    verdict = judge(rows)
    figures = {"answer": str(verdict.answer), "attack": verdict.attack, "psnr_median": verdict.psnr}
    figures |= {"gain_mean": verdict.gain.mean, "gain_low": verdict.gain.low, "gain_high": verdict.gain.high}
    return figures | {"recovered": verdict.recovered, "certified": verdict.certified, "count": images}


def verdict_cell(row: pd.Series) -> str:
    """A line of `verdict_columns`: the answer, its attack with the median PSNR, and images above the bar."""
    if not row["attack"]:
        return f"{row['answer']} ({row['count']} images)"
    return f"{row['answer']}: `{row['attack']}` {row['psnr_median']:.1f} dB, {row['recovered']} of {row['count']}"


def csv(table: pd.DataFrame, digits: int) -> str:
    """A table as CSV with so many significant digits.

    Raises:
        ValueError: a column that is not named as in `fedmjp.report.columns`.
    """
    check_columns(table.columns)
    return table.to_csv(index=False, float_format=f"%.{digits}g")


def interval(
    row: Mapping[str, Any] | pd.Series, name: str, digits: int, parts: Sequence[str] = ("_mean", "_low", "_high")
) -> str:
    """The cell "mean [low, high]" from the columns of `row` that are called `name` with each of `parts`.

    The mean alone where the interval is not finite, as over one seed.
    """
    numbers = [float(row[f"{name}{part}"]) for part in parts]
    value, low, high = (f"{number:z.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]" if np.isfinite(numbers[1:]).all() else value


def difference(row: Mapping[str, Any] | pd.Series, digits: int = 1) -> str:
    """The cell "+mean [low, high]" from the columns difference_mean, _low and _high; "" without one.

    Without the interval where it is not finite, as of one pair.
    """
    if pd.isna(row["difference_mean"]):
        return ""
    value, low, high = (float(row[f"difference{part}"]) for part in MEAN)
    bounds = f" [{low:+z.{digits}f}, {high:+z.{digits}f}]" if np.isfinite([low, high]).all() else ""
    return f"{value:+z.{digits}f}{bounds}"


MEAN = ("_mean", "_low", "_high")
