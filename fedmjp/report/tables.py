"""From rows to tables: means with 95 % bootstrap intervals, as a frame, CSV, LaTeX or a terminal table.

Rows are grouped by model, block, defence and attack. An attack that returned no image leaves no metric; such rows are
counted under `failed` and enter no mean, so a mean over few images is read together with that count. A mean over one
image is that image's value, and no interval is printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from fedmjp.metrics import METRIC_DIRECTIONS, bootstrap_mean
from fedmjp.records.rows import METRICS, distinct
from fedmjp.report.grouping import each_group
from fedmjp.report.words import defence_words

# Columns of summary.csv that say where a line comes from, so that tables of several runs concatenate.
ORIGIN = ("run_id", "dataset", "defense_parameters", "update", "batch_size")
GROUP = ("model", "block", "defense", "attack")

DIGITS = {"mse": 4, "psnr": 2, "ssim": 3, "fft2d": 4, "fft2d_official": 4, "lpips": 3, "patch_recovery": 3}

SHORT = {"patch_recovery": "patches\n> 25 dB ↓"}  # headings where there is little room
LATEX_METRICS = ("psnr", "ssim", "lpips", "patch_recovery")

_ARROWS = {"↑": r"\uparrow", "↓": r"\downarrow"}

_LATEX = {
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def summarise(rows: pd.DataFrame, by: Sequence[str] = GROUP) -> pd.DataFrame:
    """Summary of results rows, one line per group in order of first appearance.

    Args:
        rows: frame with the columns `ROW_KEYS`, as `load_rows` gives it.
        by: columns that tell groups apart.

    Returns:
        frame with the columns `by`, `count` (all rows), `failed` (rows without any metric), for each metric M
        `M_mean`, `M_low`, `M_high` (95 % bootstrap interval of the mean, NaN if no value), `psnr_median` (dB),
        `known_mean` (share of pixels in [0, 1] that the attack vouches for) with `known_low` and `known_high`,
        `certified` (number of images whose reconstruction reproduces the update; NaN where that was not checked),
        `seconds_mean` (s) and `diagnosis` (the most common non-empty one, "" if there is none).
    """
    groups = each_group(rows, by, [*METRICS, "known", "certified", "seconds", "diagnosis"])
    records = [dict(zip(by, key, strict=True)) | _summary(group) for key, group in groups]
    return pd.DataFrame(records, columns=_columns(by))


def as_text(summary: pd.DataFrame, width: int = 120) -> Table:
    """The summary for a terminal `width` characters wide: mean [low, high] of the four metrics people ask for.

    One section per defence. Below 120 characters the interval goes on a line of its own. LPIPS is shown only where it
    was measured.
    """
    metrics = ["psnr", "ssim", *(["lpips"] if "lpips" in measured(summary) else []), "patch_recovery"]
    several = summary["model"].nunique() > 1 or summary["block"].nunique() > 1
    checked = summary["known_mean"].notna().any()
    gap = "\n" if width < 120 else " "
    table = Table(box=box.SIMPLE_HEAD, width=min(width, 130), pad_edge=False, show_edge=False, padding=0)
    table.add_column("Defence\n  attack", overflow="fold")
    table.add_column("Images", justify="right", overflow="fold")
    for metric in metrics:
        table.add_column(SHORT.get(metric, heading(metric).replace(" ", "\n", 1)), justify="right", no_wrap=True)
    for column in ("vouched\nfor", "certi-\nfied") if checked else ():
        table.add_column(column, justify="right", no_wrap=True)
    for (model, block, defense), group in summary.groupby(["model", "block", "defense"], sort=False):
        title = defence_words(defense)
        table.add_row(Text(f"{title} ({model}, {block})" if several else title, style="bold"))
        for line in group.to_dict("records"):
            cells = [f"  {line['attack']}", images_text(line)]
            cells += [interval_text(line, metric, gap, digits=2) for metric in metrics]
            cells += [share_text(line), certified_text(line)] if checked else []
            table.add_row(*map(Text, cells))  # Text, because rich would take [low, high] for markup
        table.add_section()
    return table


def interval_text(line: dict[str, Any], metric: str, gap: str = " ", digits: int | None = None) -> str:
    """One summary line's metric as "mean [low, high]", or a dash where it has no value.

    Args:
        gap: what stands between the mean and its interval.
        digits: decimals; None takes those customary for the metric.
    """
    mean, low, high = (line[f"{metric}_{part}"] for part in ("mean", "low", "high"))
    if np.isnan(mean):
        return "–"
    digits = DIGITS[metric] if digits is None else digits
    if line["count"] - line["failed"] == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f}{gap}[{low:.{digits}f}, {high:.{digits}f}]"


def heading(metric: str) -> str:
    """A metric's label, a no-break space and the arrow towards less leakage, as in the MJP paper's tables."""
    direction = METRIC_DIRECTIONS[metric]
    return f"{direction.label}\N{NO-BREAK SPACE}{'↑' if direction.higher_is_more_private else '↓'}"


def images_text(line: dict[str, Any]) -> str:
    """How many images one summary line's means rest on: "16", or "12 of 16" where an attack returned none."""
    count, failed = int(line["count"]), int(line["failed"])
    return f"{count - failed} of {count}" if failed else str(count)


def share_text(line: dict[str, Any]) -> str:
    """The share of pixels that an attack vouches for in one summary line, in per cent, or a dash for guesses."""
    return "–" if np.isnan(line["known_mean"]) else f"{line['known_mean']:.0%}"


def certified_text(line: dict[str, Any]) -> str:
    """How many of one summary line's images are certified, or a dash where that was not checked."""
    return "–" if np.isnan(line["certified"]) else f"{line['certified']:.0f} of {line['count']:.0f}"


def measured(summary: pd.DataFrame) -> list[str]:
    """The metrics with at least one value in the summary, in the order of `METRICS`."""
    return [metric for metric in METRICS if summary[f"{metric}_mean"].notna().any()]


def _columns(by: Sequence[str]) -> list[str]:
    means = [f"{name}_{part}" for name in (*METRICS, "known") for part in ("mean", "low", "high")]
    return [*by, "count", "failed", *means, "certified", "psnr_median", "seconds_mean", "diagnosis"]


def _summary(group: pd.DataFrame) -> dict[str, Any]:
    line: dict[str, Any] = {"count": len(group), "failed": int(group[list(METRICS)].isna().all(axis=1).sum())}
    for metric in METRICS:
        line |= dict(zip((f"{metric}_mean", f"{metric}_low", f"{metric}_high"), _interval(group[metric]), strict=True))
    diagnoses = group["diagnosis"][group["diagnosis"] != ""].astype(object)
    # Rows that are means over seeds, and those of guesses, say neither.
    known, certified = (
        group[name].astype(float) if name in group else pd.Series(np.nan, group.index)
        for name in ("known", "certified")
    )
    line |= dict(zip(("known_mean", "known_low", "known_high"), _interval(known), strict=True))
    return line | {
        "certified": certified.sum() if certified.notna().any() else np.nan,
        "psnr_median": group["psnr"].median(),
        "seconds_mean": group["seconds"].mean(),
        # value_counts breaks ties by first appearance
        "diagnosis": diagnoses.value_counts().index[0] if len(diagnoses) else "",
    }


def _interval(values: pd.Series) -> tuple[float, float, float]:
    interval = bootstrap_mean(values.to_numpy())
    return interval.mean, interval.low, interval.high


def as_csv(rows: pd.DataFrame, summary: pd.DataFrame) -> str:
    """The summary of a run's rows as CSV, full precision and NaN as an empty field, with the columns `ORIGIN`.

    Args:
        rows: as `load_rows` gives them. Where a line is of several values of `ORIGIN`, all are given.
        summary: what `summarise` gives for the rows.
    """
    origins = [[_values(group[name]) for name in ORIGIN] for _, group in each_group(rows, GROUP, ORIGIN)]
    return pd.concat([pd.DataFrame(origins, columns=list(ORIGIN)), summary], axis=1).to_csv(index=False)


def _values(column: pd.Series) -> str:
    """All values of a column, each once."""
    return "; ".join(dict.fromkeys(map(_plain, distinct(column.astype(object)))))


def as_latex(summary: pd.DataFrame) -> str:
    """The summary as a LaTeX table body (needs booktabs): mean \\pm half the 95 % interval of `LATEX_METRICS`.

    In \\footnotesize it fits the text width of a two-column article. Arrows point to less leakage. Metrics
    without a single value are left out.
    """
    metrics = [metric for metric in LATEX_METRICS if metric in measured(summary)]
    columns = 2 + len(metrics)
    lines = [
        r"% Mean and half the 95 % bootstrap interval over images; arrows point to less leakage.",
        r"{\footnotesize\setlength{\tabcolsep}{4pt}%",
        rf"\begin{{tabular}}{{l{'r' * (columns - 1)}}}",
        r"\toprule",
        " & ".join(["Attack", "Images", *map(latex_heading, metrics)]) + r" \\",
    ]
    for (model, block, defense), group in summary.groupby(["model", "block", "defense"], sort=False):
        title = f"{escape(defence_words(defense))} ({escape(model)}, {escape(block)} block)"
        lines += [r"\midrule", rf"\multicolumn{{{columns}}}{{l}}{{\emph{{{title}}}}} \\"]
        for line in group.to_dict("records"):
            cells = [escape(line["attack"]), images_text(line), *(latex_value(line, m) for m in metrics)]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", ""])


def latex_heading(metric: str) -> str:
    """`heading` in LaTeX."""
    label, arrow = heading(metric).split("\N{NO-BREAK SPACE}")
    label = "Patches $>$ 25 dB" if metric == "patch_recovery" else escape(label)
    return rf"{label} ${_ARROWS[arrow]}$"


def latex_value(line: dict[str, Any], metric: str) -> str:
    """One summary line's metric as mean and half its interval, or two dashes."""
    mean, low, high = (line[f"{metric}_{part}"] for part in ("mean", "low", "high"))
    if np.isnan(mean):
        return "--"
    digits = DIGITS[metric]
    if line["count"] - line["failed"] == 1:
        return f"${mean:.{digits}f}$"
    return rf"${mean:.{digits}f} \pm {(high - low) / 2:.{digits}f}$"


def escape(text: Any) -> str:
    """Text with LaTeX's special characters spelled out."""
    return "".join(_LATEX.get(letter, letter) for letter in str(text))


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else str(value)
