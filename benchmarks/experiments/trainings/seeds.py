"""Tables of trainings repeated over seeds: means, paired differences, and their agreement with a paper's figures.

Two uncertainties are given. `value_low` and `value_high` are Student's 95 % interval over seeds: what another training,
on other images, would give. `one_seed_margin` is half the width of the bootstrap interval over the test images of one
training, averaged over seeds: what other test images would give of the very same weights. Differences are taken seed by
seed between variants that share weights at the start, order of images and test images, so that what a seed does to both
cancels.

A verdict compares the sign of a difference with the paper's (`experiments.trainings.verdicts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.rendering import difference, interval, markdown_table
from experiments.trainings.verdicts import p_value, signs_in_words, with_verdicts
from fedmjp.metrics import t_interval
from fedmjp.report.styles import NORMAL, SMALL, dress, save, style

# How a metric is called, its digits in a table, and where it is measured (gamma at inference).
METRICS = {
    "accuracy": ("Top-1 (%)", 1, 0.0),
    "diff_norm": ("Diff. Norm.", 3, 0.5),
    "diff_norm_root": ("not squared", 2, 0.5),
    "diff_share": ("of another image's", 4, 0.5),
    "consistency": ("Consistency (%)", 1, 0.5),
}


def seeds_table(
    rows: pd.DataFrame, against: Mapping[str, str], paper: Mapping[str, Mapping[str, float]]
) -> pd.DataFrame:
    """One line a variant and metric, as far as the rows have the metric.

    Args:
        rows: of `experiments.trainings.variants.train_lines`.
        against: variant -> the variant it is compared with.
        paper: variant -> metric -> the paper's figure, as far as it gives one.

    Returns:
        columns line, model, defense, metric, value_mean, value_low, value_high (over seeds), seeds, one_seed_margin,
        paper_value, against, difference_mean, difference_low, difference_high, paper_difference, difference_p, verdict.
    """
    lines = []
    for name, group in rows.groupby("line", sort=False):
        for metric, (_, _, gamma) in METRICS.items():
            own = _by_seed(group, metric, gamma) if metric in group else pd.Series(dtype=float)
            if own.isna().all():  # rows from before the metric was taken
                continue
            at = group[group["gamma"] == gamma]
            figure = paper.get(name, {}).get(metric, math.nan)
            line = {
                "line": name,
                "model": group["model"].iloc[0],
                "defense": group["defense"].iloc[0],
                "metric": metric,
                **mean_over_seeds("value", own),
                "one_seed_margin": float((at[f"{metric}_high"] - at[f"{metric}_low"]).astype(float).mean() / 2),
                "paper_value": figure,
                "against": against.get(name, ""),
            }
            if against.get(name):
                other = _by_seed(rows[rows["line"] == against[name]], metric, gamma)
                theirs = figure - paper.get(against[name], {}).get(metric, math.nan)
                line |= paired_difference(own, other, theirs)
            lines.append(line)
    return with_verdicts(pd.DataFrame(lines))


def _by_seed(group: pd.DataFrame, metric: str, gamma: float) -> pd.Series:
    return group[group["gamma"] == gamma].set_index("seed")[metric].astype(float)


def mean_over_seeds(name: str, values: pd.Series | np.ndarray) -> dict[str, float]:
    """Columns NAME_mean, NAME_low, NAME_high (Student's 95 % interval over seeds) and seeds, of one value a seed."""
    found = t_interval(np.asarray(values, float))
    return {f"{name}_mean": found.mean, f"{name}_low": found.low, f"{name}_high": found.high, "seeds": found.count}


def paired_difference(own: pd.Series, other: pd.Series, paper: float = math.nan) -> dict[str, object]:
    """Columns difference_mean, difference_low, difference_high (Student's 95 % interval over the seeds that both
    lines have), paper_difference and difference_p (`verdicts.p_value`).

    Args:
        own, other: one value a seed, with the seeds as index.
        paper: the paper's difference, NaN where it gives none.
    """
    seeds = own.index.intersection(other.index)
    return difference_over_seeds((own[seeds] - other[seeds]).to_numpy(float), paper)


def difference_over_seeds(differences: np.ndarray, paper: float = math.nan) -> dict[str, object]:
    """The columns of `paired_difference`, from the differences themselves, one a seed."""
    found = t_interval(differences)
    return {
        "difference_mean": found.mean,
        "difference_low": found.low,
        "difference_high": found.high,
        "paper_difference": round(paper, 6),
        "difference_p": p_value(differences),
    }


def markdown(
    table: pd.DataFrame,
    metrics: Sequence[str],
    notes: Mapping[str, str] = MappingProxyType({}),
    more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> str:
    """A variant a row; of each metric our mean with its interval over seeds and the paper's figure in
    parentheses, and the difference with the verdict.

    Args:
        notes: variant -> what it is, in words.
        more: further columns, head -> variant -> cell.
    """
    heads, metrics = ["line"], [metric for metric in metrics if metric in set(table["metric"])]
    for metric in metrics:
        label = METRICS[metric][0]
        heads += [label, f"difference, {label}"]
    heads += more
    lines = []
    for name, group in table.groupby("line", sort=False):
        own = group.set_index("metric")
        cells = [f"{name}: {notes[name]}" if name in notes else name]
        for metric in metrics:
            if metric not in own.index:
                cells += ["", ""]
                continue
            row, digits = own.loc[metric], METRICS[metric][1]
            mean = interval(row, "value", digits)
            cells += [
                mean if pd.isna(row["paper_value"]) else f"{mean} ({row['paper_value']:g})",
                difference_cell(row, digits) if row["against"] else "",
            ]
        lines.append([*cells, *(column.get(name, "") for column in more.values())])
    margin = table[table["metric"] == "accuracy"]["one_seed_margin"].mean()
    return markdown_table(heads, lines) + (
        f"\n\nMeans over {seed_count(table['seeds'])} with Student's 95 % interval over seeds"
        + (", the paper's figures in parentheses" if table["paper_value"].notna().any() else "")
        + "; differences are paired by seed. The test images of one training alone leave its accuracy uncertain by "
        f"± {margin:.1f} points. {signs_in_words(table)}".rstrip()
    )


def seed_count(seeds: Sequence[int] | pd.Series) -> str:
    """How many seeds lie behind the lines of a table, in words: "3 seeds", "1 to 3 seeds"."""
    least, most = min(seeds), max(seeds)
    words = f"{least}" if least == most else f"{least} to {most}"
    return f"{words} seed{'' if most == 1 else 's'}"


def mean_cell(row: pd.Series, name: str, digits: int = 1) -> str:
    """The cell "mean [low, high]" over seeds; of one seed "mean ± margin (one seed)", over test images alone.

    Args:
        row: with the columns of `mean_over_seeds`, and one_seed_margin where it is known.
    """
    cell = interval(row, name, digits)
    if row["seeds"] > 1:
        return cell
    margin = row.get("one_seed_margin", math.nan)
    return f"{cell} (one seed)" if pd.isna(margin) else f"{cell} ± {margin:.{digits}f} (one seed)"


def change_cell(row: pd.Series, digits: int = 1) -> str:
    """The cell "+mean [low, high]" over seeds, of one seed "+mean ± margin" over test images alone; "" without one.

    Args:
        row: with the columns of `paired_difference`, and difference_margin where it is known.
    """
    if pd.isna(row.get("difference_mean", math.nan)):
        return ""
    cell, margin = difference(row, digits), row.get("difference_margin", math.nan)
    single = not np.isfinite(row["difference_low"]) and not pd.isna(margin)
    return f"{cell} ± {margin:.{digits}f}" if single else cell


def difference_cell(row: pd.Series, digits: int = 1) -> str:
    """`change_cell`, then the paper's difference and the verdict, where the paper gives one."""
    cell = change_cell(row, digits)
    if not cell or pd.isna(row["verdict"]) or not row["verdict"]:
        return cell
    return f"{cell} (paper {row['paper_difference']:+.3g}: {row['verdict']})"


def ratio_curves(panel: Axes, rows: pd.DataFrame, metric: str, labels: Mapping[str, str]) -> None:
    """A metric against the masking ratio at inference, a curve a variant, bars over seeds (Student, 95 %).

    Args:
        labels: variant -> its words in the legend; only these are drawn.
    """
    for index, (name, label) in enumerate(labels.items()):
        group = rows[rows["line"] == name].groupby("gamma")[metric]
        found = [t_interval(values.to_numpy()) for _, values in group]
        x = np.array(sorted(group.groups)) + 0.01 * (index - (len(labels) - 1) / 2)
        mean = np.array([i.mean for i in found])
        most = 100 if metric == "consistency" else np.inf  # an interval may reach beyond what there is
        bounds = [[i.mean - i.low for i in found], [min(i.high, most) - i.mean for i in found]]
        error = np.nan_to_num(np.array(bounds), posinf=0)
        look = style(index) | {"ms": 4, "lw": 1.2, "elinewidth": 0.7, "capsize": 2}
        panel.errorbar(x, mean, yerr=error, label=label, **look)
    if metric == "consistency":
        panel.set_ylim(top=102)
    panel.set_xlabel("Masking ratio at inference", fontsize=NORMAL)
    panel.set_ylabel(METRICS[metric][0], fontsize=NORMAL)
    dress(panel)


def difference_points(panel: Axes, table: pd.DataFrame, metric: str, labels: Mapping[str, str]) -> None:
    """Each variant's difference with its interval over seeds, and the paper's beside it.

    Args:
        labels: variant -> its words on the axis; only these are drawn, from top to bottom.
    """
    own = table[table["metric"] == metric].set_index("line").loc[list(labels)]
    places = np.arange(len(own))[::-1]
    middle = own["difference_mean"]
    error = np.array([middle - own["difference_low"], own["difference_high"] - middle])
    points = {"ls": "", "ms": 4}
    panel.axvline(0, color="#808080", lw=0.8)
    panel.errorbar(middle, places + 0.12, xerr=error, capsize=2, label="ours", **style(0) | points)
    panel.plot(own["paper_difference"], places - 0.18, label="paper (ImageNet-1k)", **style(1) | points)
    panel.set_yticks(places, list(labels.values()))
    panel.set_xlabel(f"Difference in {METRICS[metric][0]}", fontsize=NORMAL)
    dress(panel)


def save_with_legend(drawing: Figure, panel: Axes, path: Path, columns: int) -> None:
    """Save with `panel`'s legend below all panels."""
    handles, labels = panel.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)
    save(drawing, path)
