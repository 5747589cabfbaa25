"""The accuracy-privacy plane of several federations, drawn from their table (`experiments.tradeoff.table`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.tradeoff.table import RECOGNISED, STRENGTHS
from fedmjp.metrics.intervals import wilson
from fedmjp.records.rows import BASELINES
from fedmjp.report.figures import draw_by_round, legend_below, strongest_attacks
from fedmjp.report.styles import NORMAL, OBJECTIVES, SMALL, WIDTH, attack_style, defence_colour, dress, error_bars, save

GUESS = "mean_image"
PANELS = 3  # a line of the figure
NEAR = np.array([0.1, 0.07])  # shares of the range of an axis
LABEL = np.array([0.4, 0.06])  # of the longest label, in such shares
NARROW = 13  # characters in a line of a column's label
LONGEST = 56  # characters in a line of a federation's name
MOST_PANELS = 12  # with more points than these, a line for each
_MARKERS = ("o", "s", "^", "D")  # a partition each


def tradeoff_figure(
    table: pd.DataFrame, rows: pd.DataFrame, rounds: pd.DataFrame, path: Path, measured: str = "Test accuracy"
) -> None:
    """Accuracy over rounds, the accuracy-privacy plane, and leakage over rounds with a panel a defence; of more than
    `MOST_PANELS` defences `lines_figure`.

    Args:
        measured: what the accuracy is, for the axes.
    """
    points = list(dict.fromkeys(table["point"]))
    if len(points) > MOST_PANELS:
        return lines_figure(table, path, measured)
    lines = -(-len(points) // PANELS)
    figure = Figure(figsize=(WIDTH, 3.9 + 2.6 * lines), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.6, 0.3 + 2.6 * lines))
    partitions = list(dict.fromkeys(rounds["partition"]))
    *over_rounds, plane = upper.subplots(1, len(partitions) + 1)
    for axes, partition in zip(over_rounds, partitions, strict=True):
        _draw_accuracy(axes, rounds[rounds["partition"] == partition], points)
        axes.set_title(partition, fontsize=NORMAL)
        axes.sharey(over_rounds[0])
    over_rounds[0].set_ylabel(f"{measured} (%)", fontsize=NORMAL)
    _draw_plane(plane, table, points)
    plane.set_xlabel(f"{measured} (%), last round", fontsize=NORMAL)
    handles, labels = plane.get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    panels = lower.subplots(lines, min(PANELS, len(points)), sharex=True, squeeze=False)
    for axes, point in zip(panels.flat, points, strict=False):
        own = rows[rows["point"] == point]
        draw_by_round(axes, own, [*strongest_attacks(own)[0], *BASELINES])
        axes.set_title(point, fontsize=NORMAL)
        axes.set_xlabel("Round", fontsize=NORMAL)
        axes.tick_params(labelbottom=True)
        _over_rounds(axes)
    for axes in panels.flat[len(points) :]:
        axes.set_axis_off()
    lower.supylabel("PSNR (dB) of the six strongest attacks, a scale a panel", fontsize=NORMAL)
    legend_below(lower, list(panels.flat), columns=3)
    save(figure, path)


def lines_figure(table: pd.DataFrame, path: Path, measured: str) -> None:
    """A line a federation with its accuracy and what its strongest attack found, numbered; and the planes of the same
    numbers.

    Args:
        measured: see `tradeoff_figure`.
    """
    found = table[table["strongest"].astype(bool)]
    found = found.sort_values("psnr_mean", ascending=False, kind="stable").reset_index(drop=True)
    shown = [(f"{measured} (%)", "accuracy", 100.0), ("PSNR (dB)", "psnr", 1.0)]  # label, column, scale
    if "recognised_mean" in found and found["recognised_mean"].notna().any():
        shown.append((f"LPIPS below {RECOGNISED:g} (%)", "recognised", 100.0))
    if "reidentified_mean" in found and found["reidentified_mean"].notna().any():
        shown.append((f"Nearest of {found['candidates'].max():,.0f} (%)", "reidentified", 100.0))
    figure = Figure(figsize=(WIDTH, 3.2 + 0.19 * len(found)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(0.6 + 0.19 * len(found), 2.6))
    columns, planes = upper.subplots(1, len(shown), sharey=True), lower.subplots(1, len(shown) - 1, squeeze=False)[0]
    for axes, (label, name, scale) in zip(columns, shown, strict=True):
        _draw_lines(axes, found, name, scale)
        axes.set_xlabel(fill(label, NARROW), fontsize=SMALL)
    columns[0].set_yticks(range(len(found)), _numbered(found), fontsize=SMALL, linespacing=0.9)
    columns[0].set_ylim(len(found) - 0.5, -0.5)
    for axes, (label, name, scale) in zip(planes, shown[1:], strict=True):
        _draw_numbers(axes, found, name, scale)
        axes.set_xlabel(shown[0][0], fontsize=SMALL)
        axes.set_ylabel(label, fontsize=SMALL)
    guess = table.loc[table["attack"] == GUESS, "psnr_mean"].mean()
    columns[1].axvline(guess, lw=1, **attack_style(GUESS))
    planes[0].axhline(guess, lw=1, label="PSNR of the mean image (no gradient)", **attack_style(GUESS))
    if any(map(_shows_nothing, found.itertuples())):
        planes[0].plot([], [], ls="", marker="o", mfc="white", color="#707070", label="no better than the best guess")
    handles, labels = planes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    save(figure, path)


def _numbered(found: pd.DataFrame) -> list[str]:
    """Point, strongest attack and number of each line, with its partition where there are several."""
    several = found["partition"].nunique() > 1
    names = [f"{line.partition}, {line.point}" if several else line.point for line in found.itertuples()]
    pairs = enumerate(zip(names, found["attack"], strict=True), 1)
    return [f"{_in_lines(f'{name}: {attack}')}  {n}" for n, (name, attack) in pairs]


def _in_lines(name: str) -> str:
    """A long name in several lines, broken between the parts and options of a chain; a short one as it is."""
    return name if len(name) <= LONGEST else fill(re.sub(r",(?=\S)", ", ", name.replace("+", " + ")), LONGEST)


def _draw_lines(axes: Axes, found: pd.DataFrame, name: str, scale: float) -> None:
    """A measure of each line, with its interval."""
    for line in found.itertuples():
        low, mean, high = (scale * getattr(line, f"{name}_{part}") for part in ("low", "mean", "high"))
        bounds = np.nan_to_num([[max(mean - low, 0)], [max(high - mean, 0)]])
        axes.errorbar([mean], [line.Index], xerr=bounds, capsize=1.5, **_style(line))
    dress(axes, grid="both")


def _draw_numbers(axes: Axes, found: pd.DataFrame, name: str, scale: float) -> None:
    """A measure against the accuracy, with the numbers of the lines."""
    at = np.stack([100 * found["accuracy_mean"], scale * found[f"{name}_mean"]], axis=1)  # (lines, 2)
    for line in found.itertuples():
        axes.plot(*at[line.Index, :, None], ls="", **_style(line))
    groups = _near(at)
    places = _apart(at[[numbers[0] for numbers in groups]], LABEL * np.ptp(at, axis=0))
    for numbers, place in zip(groups, places, strict=True):
        text = _in_ranges([n + 1 for n in numbers])
        beside = place[0] - at[:, 0].min() < NEAR[0] * np.ptp(at[:, 0])  # no room to the left
        style = {"xytext": (4, 1)} if beside else {"ha": "right", "xytext": (-4, 1)}
        axes.annotate(text, place, textcoords="offset points", fontsize=6, va="center", **style)
    axes.margins(y=0.1)
    dress(axes, grid="both")


def _apart(places: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Places (n, 2) of labels of at most that size (2,), moved up where two would overlap."""
    moved = places.copy()
    done: list[int] = []
    for number in places[:, 1].argsort(kind="stable"):
        for other in sorted(done, key=lambda one: moved[one, 1]):
            if (abs(moved[number] - moved[other]) < size).all():
                moved[number, 1] = moved[other, 1] + size[1]
        done.append(number)
    return moved


def _in_ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in words, three and more in a row as the first and the last of them: "1, 3-5, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(word for part in words for word in part)


def _near(at: np.ndarray) -> list[list[int]]:
    """Numbers of points (n, 2), together where they lie within `NEAR` of the ranges from the first of them."""
    unit, groups = NEAR * np.ptp(at, axis=0).clip(min=1e-9), list[list[int]]()
    for number, point in enumerate(at):
        near = [group for group in groups if (abs(point - at[group[0]]) < unit).all()]
        if near:
            near[0].append(number)
        else:
            groups.append([number])
    return groups


def _style(line: Any) -> dict[str, Any]:
    """Of a federation's dot: hollow where it shows nothing."""
    colour = _colour(line.point)
    return {"color": colour, "mfc": "white" if _shows_nothing(line) else colour, "marker": "o", "ms": 4, "lw": 0.9}


def _colour(point: str) -> str:
    """Colour of a defence with its strength in words (`point_of`), or of an objective."""
    name, *rest = point.split(", ")
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    for part in rest:
        for option, symbol in STRENGTHS.items():
            if part.startswith(f"{symbol} = "):
                return defence_colour(name, (option, float(part.removeprefix(f"{symbol} = "))))
    return defence_colour(name)


def _draw_accuracy(axes: Axes, rounds: pd.DataFrame, points: Sequence[str]) -> None:
    for point, own in rounds.groupby("point", sort=False):
        of_round = own.groupby("round")
        share, count = of_round["accuracy"].mean(), int(of_round["test_images"].sum().iloc[0])
        low, high = wilson(share.to_numpy(), count)
        table = pd.DataFrame({"mean": 100 * share.to_numpy(), "low": 100 * low, "high": 100 * high})
        beside = 0.015 * share.index.max() * (points.index(point) - (len(points) - 1) / 2)
        line = {"color": _colour(point), "marker": "o", "ms": 3.5, "lw": 1.1, "elinewidth": 0.6, "capsize": 1}
        error_bars(axes, share.index + beside, table, **line)
    axes.set_xlabel("Round", fontsize=NORMAL)
    _over_rounds(axes)


def _draw_plane(axes: Axes, table: pd.DataFrame, points: Sequence[str]) -> None:
    partitions = list(dict.fromkeys(table["partition"]))
    best = table[table["strongest"].astype(bool)]
    for line in best.itertuples():
        low, high = 100 * (line.accuracy_mean - line.accuracy_low), 100 * (line.accuracy_high - line.accuracy_mean)
        bounds = [[max(line.psnr_mean - line.psnr_low, 0)], [max(line.psnr_high - line.psnr_mean, 0)]]
        colour = _colour(line.point)
        axes.errorbar(
            100 * line.accuracy_mean,
            line.psnr_mean,
            xerr=[[low], [high]],
            yerr=bounds,
            color=colour,
            mfc="white" if _shows_nothing(line) else colour,
            marker=_MARKERS[partitions.index(line.partition) % 4],
            ms=6,
            lw=0.9,
            capsize=2,
        )
    guess = table.loc[table["attack"] == GUESS, "psnr_mean"].mean()
    axes.set_ylabel("PSNR (dB), strongest attack", fontsize=NORMAL)
    named = {point: list(dict.fromkeys(best.loc[best["point"] == point, "attack"])) for point in points}
    for point in points:
        label = f"{point}: {', '.join(named[point]) or 'no image'}{_in_no_order(best[best['point'] == point])}"
        axes.plot([], [], ls="", marker="o", color=_colour(point), label=label)
    axes.axhline(guess, label="mean image (no gradient)", lw=1.2, **attack_style(GUESS))
    for index, partition in enumerate(partitions):
        axes.plot([], [], color="#707070", marker=_MARKERS[index % 4], ls="", label=partition)
    if any(map(_shows_nothing, best.itertuples())):
        axes.plot([], [], ls="", marker="o", mfc="white", color="#707070", label="no better than the best guess")
    _over_rounds(axes)


def _shows_nothing(line: Any) -> bool:
    """Whether the strongest attack is no better than the best guess, and none brings patches above 25 dB either."""
    return not line.gain_low > 0 and not line.most_patches


def _in_no_order(own: pd.DataFrame) -> str:
    """What PSNR does not show of a point's federations: patches whose order the update does not hold."""
    found = own[own["any_place"].astype(bool)]["patches_found_mean"]
    return f" ({100 * found.min():.0f} % of patches)" if len(found) else ""


def _over_rounds(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    dress(axes, grid="both")
