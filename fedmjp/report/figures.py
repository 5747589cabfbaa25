"""The report's curves: leakage by round, training. Each is a PNG (200 dpi) and a PDF; styles stand in `styles`."""

from __future__ import annotations

import os
import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmjp.audit.strongest import IMAGE, gains_over_guesses, ranked
from fedmjp.metrics.intervals import bootstrap_mean, wilson
from fedmjp.records.rows import BASELINES
from fedmjp.report.grouping import each_group
from fedmjp.report.styles import (
    MOST_LINES,
    NORMAL,
    SMALL,
    attack_order,
    attack_style,
    dress,
    error_bars,
    label_colour,
    save,
    style,
)
from fedmjp.report.words import defence_words

MOST_MARKED = 40  # rounds that are marked one by one


def leakage_by_round_figure(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draw mean PSNR with its 95 % bootstrap interval against the round: a panel per defence, a line per attack.

    Args:
        rows: results rows, as `load_rows` gives them. Attacks without any image, and those weaker than the six
            strongest (`verdict.ranked`), are named below their panel.
        path: the .png to write; a .pdf goes beside it.

    Raises:
        ValueError: no rows.
    """
    if rows.empty:
        raise ValueError("leakage_by_round_figure needs at least one row")
    defenses = rows["defense"].nunique()
    keys = [key for key in ("model", "block") if len(rows[["defense", key]].drop_duplicates()) > defenses]
    groups = list(each_group(rows, [*keys, "defense"], [*IMAGE, "attack", "psnr"]))
    per_line = 2 if len(groups) == 4 else min(3, len(groups))
    lines = -(-len(groups) // per_line)
    figure = Figure(figsize=(max(4.6, 2.3 * per_line), 1.05 + 2.5 * lines), layout="constrained")
    grid = figure.subplots(lines, per_line, sharex=True, sharey=True, squeeze=False)
    for axes, (key, group) in zip(grid.flat, groups, strict=False):
        _draw_leakage(axes, group)
        axes.set_title(", ".join([*map(str, key[:-1]), defence_words(key[-1])]), fontsize=NORMAL)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    figure.supylabel("PSNR (dB), higher = more leakage", fontsize=NORMAL)
    legend_below(figure, list(grid.flat), columns=2 if per_line == 1 else per_line)
    save(figure, path)


def training_figure(rounds: pd.DataFrame, path: str | os.PathLike[str], test_images: int | None = None) -> None:
    """Draw test accuracy and test loss against the round, one line per defence.

    Args:
        rounds: columns `defense`, `round`, `loss`, `accuracy` (a fraction in [0, 1]).
        path: the .png to write; a .pdf goes beside it.
        test_images: number of images behind an accuracy, for its 95 % interval (Wilson's); None for no interval. Of the
            loss only the mean is recorded.

    Raises:
        ValueError: no rounds.
    """
    if rounds.empty:
        raise ValueError("training_figure needs at least one round")
    figure = Figure(figsize=(6.6, 3.0), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    labels = list(rounds["defense"].unique())
    for index, (defense, group) in enumerate(rounds.groupby("defense", sort=False)):
        group = group.sort_values("round")
        line = {"color": label_colour(defense), "marker": style(index)["marker"], "ms": 4, "lw": 1.4}
        share = group["accuracy"].to_numpy(float)
        low, high = wilson(share, test_images) if test_images else (share, share)
        table = pd.DataFrame({"mean": 100 * share, "low": 100 * low, "high": 100 * high})
        beside = 0.04 * (index - (len(labels) - 1) / 2)
        error_bars(accuracy, group["round"] + beside, table, label=defence_words(defense), **line)
        loss.plot(group["round"], group["loss"], **line)
    accuracy.set_ylabel("Test accuracy (%)", fontsize=NORMAL)
    loss.set_ylabel("Test loss", fontsize=NORMAL)
    for axes in (accuracy, loss):
        _round_axis(axes, sorted(rounds["round"].unique()))
    words = "One seed a defence; of the loss only the mean is recorded."
    words += f" Bars: 95 % interval over {test_images} test images." if test_images else ""
    legend_below(figure, [accuracy], columns=4, title=words)
    save(figure, path)


def strongest_attacks(rows: pd.DataFrame, most: int = MOST_LINES) -> tuple[list[str], list[str]]:
    """(the attacks that are drawn, weaker ones that are not), the strongest first by the rule of the verdict."""
    names = ranked(gains_over_guesses(rows))
    return names[:most], names[most:]


def draw_by_round(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """Mean PSNR by round with its 95 % bootstrap interval: as bars, or as a band (guesses, over `MOST_MARKED` rounds).

    Args:
        rows: of one panel, with the columns attack, round and psnr (dB).
        names: the attacks and guesses to draw.
    """
    spacing = float(np.diff(sorted(rows["round"].unique())).min()) if rows["round"].nunique() > 1 else 1.0
    attacks = [name for name in names if name not in BASELINES]
    for name in attack_order(names):
        own = rows.loc[(rows["attack"] == name) & rows["psnr"].notna(), ["round", "psnr"]]
        found = {number: bootstrap_mean(values.to_numpy()) for number, values in own.groupby("round")["psnr"]}
        if not found:
            continue
        x = np.array(list(found), dtype=float)
        table = pd.DataFrame(list(found.values()))
        if name in BASELINES or len(x) > MOST_MARKED:
            _draw_band(axes, name, x, table)
            continue
        # Side by side, so that intervals of attacks with equal scores stay visible.
        x = x + (attacks.index(name) - (len(attacks) - 1) / 2) * 0.06 * spacing
        error_bars(axes, x, table, label=name, ms=4, lw=1.2, **attack_style(name))


def legend_below(figure: Figure, panels: list[Axes], columns: int, title: str = "") -> None:
    """One legend for all panels below them, each label once, under a line of text."""
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = attack_order(handles)
    words = [f"{name} (no gradient)" if name in BASELINES else name for name in shown]
    if handles:
        place = {"loc": "outside lower center", "ncols": min(len(shown), columns)}
        place |= {"title": title, "title_fontsize": SMALL} if title else {}
        figure.legend([handles[name] for name in shown], words, fontsize=SMALL, frameon=False, **place)


def _draw_leakage(axes: Axes, group: pd.DataFrame) -> None:
    shown, weaker = strongest_attacks(group)
    draw_by_round(axes, group, [*shown, *BASELINES])
    _round_axis(axes, sorted(group["round"].unique()))
    silent = [name for name in group["attack"].unique() if name not in (*shown, *weaker, *BASELINES)]
    notes = [("no image", silent), ("weaker, not drawn", weaker)]
    lines = [
        textwrap.fill(f"{words}: {', '.join(names)}", 42, break_long_words=False) for words, names in notes if names
    ]
    if lines:
        axes.set_xlabel("\n".join(["Round", *lines]), fontsize=SMALL)


def _draw_band(axes: Axes, name: str, x: np.ndarray, table: pd.DataFrame) -> None:
    line = {key: value for key, value in attack_style(name).items() if not key.startswith("m")}
    if len(x) == 1:  # a line through one point is invisible: draw the level instead
        axes.axhline(table["mean"].iloc[0], label=name, lw=1.4, zorder=1, **line)
        axes.axhspan(table["low"].iloc[0], table["high"].iloc[0], color=line["color"], alpha=0.12, lw=0, zorder=0)
    else:
        axes.plot(x, table["mean"], label=name, lw=1.4, zorder=1, **line)
        axes.fill_between(x, table["low"], table["high"], color=line["color"], alpha=0.12, lw=0, zorder=0)


def _round_axis(axes: Axes, rounds: list[float]) -> None:
    axes.set_xlabel("Round", fontsize=NORMAL)
    dress(axes, grid="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(rounds) == 1:
        axes.set_xlim(rounds[0] - 0.6, rounds[0] + 0.6)
        axes.set_xticks(rounds)
