"""The report's pictures: reconstructions, leakage by round, training curves. Each is a PNG (200 dpi) and a PDF.

Matplotlib's object-oriented interface only, so drawing in a long run leaves no state behind. Colours are those of Okabe
and Ito (2008), told apart with any common colour blindness; markers differ too, for print in grey.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmjp.metrics.intervals import bootstrap_mean
from fedmjp.records.rows import BASELINES

MAX_PANELS = 12
DPI = 200

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_BASELINE_STYLES = ({"color": "#404040", "ls": ":"}, {"color": "#9a9a9a", "ls": (0, (1, 3))})
SMALL, NORMAL = 8, 9
_BOUNDS = ("mean", "low", "high")


@dataclass(frozen=True)
class Reconstructed:
    """What one attack made of one image.

    Attributes:
        image: float array or tensor (C, H, W) in [0, 1], or None where the attack returned none.
        psnr: against the original, in dB, or None.
        note: why there is no image, or a remark; printed only in an empty cell.
    """

    image: Any | None
    psnr: float | None
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """One row of the reconstructions figure.

    Attributes:
        title: such as "mjp, round 1, client 0"; broken at its commas.
        original: float array or tensor (C, H, W) in [0, 1]; None where it is not known.
        seen: the same, after the defence: what the model computed its gradient on.
        reconstructions: attack name to what it made of the image, in the order to be shown.
    """

    title: str
    original: Any
    seen: Any
    reconstructions: dict[str, Reconstructed] = field(default_factory=dict)


def reconstructions_figure(
    panels: list[Panel],
    path: str | os.PathLike[str],
    *,
    seen_title: str = "what the\nmodel saw",
    title: str = "",
    dpi: int = DPI,
) -> None:
    """Draw original, what the model saw and every attack's reconstruction, one row per panel.

    Args:
        panels: 1 to 12 panels; their attacks together make the columns, in order of first appearance.
        path: the .png to write; a .pdf goes beside it.
        seen_title: heading of the second column.
        title: of the figure; "" for none.
        dpi: pixels an inch; a picture is 1.15 inches wide.

    Raises:
        ValueError: no panel or more than 12.
    """
    if not 1 <= len(panels) <= MAX_PANELS:
        raise ValueError(f"reconstructions_figure draws 1 to {MAX_PANELS} panels, got {len(panels)}")
    attacks = list(dict.fromkeys(name for panel in panels for name in panel.reconstructions))
    given = [name for name in ("original", "seen") if getattr(panels[0], name) is not None]
    rows, columns = len(panels), len(given) + len(attacks)
    cell, gap, caption, label, head = 1.15, 0.08, 0.22, 0.95, 0.42  # inches
    width, height = label + columns * (cell + gap), head + rows * (cell + caption)
    figure = Figure(figsize=(width, height))
    for row, panel in enumerate(panels):
        bottom = height - head - row * (cell + caption) - cell
        label_lines = "\n".join(part.strip() for part in panel.title.split(","))
        figure.text(0.04 / width, (bottom + cell / 2) / height, label_lines, fontsize=SMALL, va="center")
        cells = [Reconstructed(getattr(panel, name), None) for name in given]
        for column, content in enumerate(cells + [panel.reconstructions.get(name) for name in attacks]):
            left = label + column * (cell + gap)
            axes = figure.add_axes((left / width, bottom / height, cell / width, cell / height))
            _draw_cell(axes, content)
            if row == 0:
                heads = {"original": "original", "seen": seen_title}
                name = [*(heads[name] for name in given), *map(_broken, attacks)][column]
                axes.set_title(name, fontsize=SMALL, pad=4, linespacing=1.0)
    if title:
        figure.text(0.04 / width, 1 - 0.12 / height, title, fontsize=SMALL, va="top", weight="bold")
    save(figure, path, dpi)


def leakage_by_round_figure(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draw mean PSNR with its 95 % bootstrap interval against the round: a panel per defence, a line per attack.

    Args:
        rows: results rows, as `load_rows` gives them. Attacks without any image are named below their panel.
        path: the .png to write; a .pdf goes beside it.

    Raises:
        ValueError: no rows.
    """
    if rows.empty:
        raise ValueError("leakage_by_round_figure needs at least one row")
    keys = [key for key in ("model", "block") if rows[key].nunique() > 1] + ["defense"]
    groups = list(rows.groupby(keys, sort=False))
    attacks = [name for name in rows["attack"].unique() if name not in BASELINES]
    styles = {name: style(index) for index, name in enumerate(attacks)}
    styles |= dict(zip(BASELINES, _BASELINE_STYLES, strict=True))
    per_line = 2 if len(groups) == 4 else min(3, len(groups))
    lines = -(-len(groups) // per_line)
    figure = Figure(figsize=(max(4.6, 2.75 * per_line), 0.75 + 2.5 * lines), layout="constrained")
    grid = figure.subplots(lines, per_line, sharex=True, sharey=True, squeeze=False)
    for axes, (key, group) in zip(grid.flat, groups, strict=False):
        _draw_leakage(axes, group, styles)
        axes.set_title(", ".join(map(str, key)), fontsize=NORMAL)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    figure.supylabel("PSNR (dB), higher = more leakage", fontsize=NORMAL)
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_legend_handles_labels()[0]}
    if handles:
        shown = [name for name in styles if name in handles]
        figure.legend(
            [handles[name] for name in shown],
            [f"{name} (no gradient)" if name in BASELINES else name for name in shown],
            loc="outside lower center",
            ncols=min(len(shown), 2 if per_line == 1 else per_line + 1),
            fontsize=SMALL,
            frameon=False,
        )
    save(figure, path)


def training_figure(rounds: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draw test accuracy and test loss against the round, one line per defence.

    Args:
        rounds: columns `defense`, `round`, `loss`, `accuracy` (a fraction in [0, 1]).
        path: the .png to write; a .pdf goes beside it.

    Raises:
        ValueError: no rounds.
    """
    if rounds.empty:
        raise ValueError("training_figure needs at least one round")
    figure = Figure(figsize=(6.6, 2.8), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for index, (defense, group) in enumerate(rounds.groupby("defense", sort=False)):
        group = group.sort_values("round")
        look = style(index) | {"ms": 4.5, "lw": 1.4}
        accuracy.plot(group["round"], 100 * group["accuracy"], label=str(defense), **look)
        loss.plot(group["round"], group["loss"], **look)
    accuracy.set_ylabel("Test accuracy (%)", fontsize=NORMAL)
    loss.set_ylabel("Test loss", fontsize=NORMAL)
    for axes in (accuracy, loss):
        _round_axis(axes, sorted(rounds["round"].unique()))
    figure.legend(loc="outside lower center", ncols=4, fontsize=SMALL, frameon=False, title=None)
    save(figure, path)


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dash pattern of the line or the points number `index`.

    Colours and markers run out together after eight; the dash pattern tells the next eight apart.
    """
    turn = index // len(_COLOURS)
    place = index % len(_COLOURS)
    return {"color": _COLOURS[place], "marker": _MARKERS[place], "ls": ("-", "--", "-.")[turn % 3]}


def _draw_cell(axes: Axes, content: Reconstructed | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color="#9a9a9a", linewidth=0.6)
    if content is None:
        axes.set_axis_off()
        return
    if content.image is None:
        axes.set_facecolor("#f5f5f5")
        reason = textwrap.shorten(content.note or "no image returned", 100, placeholder=" …")
        axes.text(
            0.5,
            0.5,
            textwrap.fill(reason, 17),
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=SMALL - 1.5,
            color="#444444",
        )
        return
    picture = _pixels(content.image)
    small = max(picture.shape[:2]) < 128
    axes.imshow(picture, vmin=0, vmax=1, cmap="gray", interpolation="nearest" if small else "antialiased")
    if content.psnr is not None and np.isfinite(content.psnr):
        axes.set_xlabel(f"{content.psnr:.1f} dB", fontsize=SMALL, labelpad=2)


def draw_picture(axes: Axes, image: Any | None, psnr: float | None) -> None:
    """One cell of a figure: an image (C, H, W) in [0, 1] with its PSNR (dB) below, or an empty cell."""
    _draw_cell(axes, None if image is None else Reconstructed(image, psnr))


def _pixels(image: Any) -> np.ndarray:
    """(C, H, W) in any float type, array or tensor, to (H, W, 3) or (H, W) in [0, 1]; NaN shows black."""
    if hasattr(image, "detach"):  # a tensor, perhaps half precision and on a GPU
        image = image.detach().cpu().float()
    picture = np.nan_to_num(np.asarray(image, dtype=np.float64)).clip(0, 1)
    if picture.ndim != 3 or picture.shape[0] not in (1, 3):
        raise ValueError(f"an image is (1 or 3, H, W), got {picture.shape}")
    return picture[0] if picture.shape[0] == 1 else picture.transpose(1, 2, 0)


def _draw_leakage(axes: Axes, group: pd.DataFrame, styles: dict[str, dict[str, Any]]) -> None:
    rounds = sorted(group["round"].unique())
    spacing = float(np.diff(rounds).min()) if len(rounds) > 1 else 1.0
    drawn = [name for name in styles if group.loc[group["attack"] == name, "psnr"].notna().any()]
    attacks = [name for name in drawn if name not in BASELINES]
    for name in drawn:
        points = [
            (number, bootstrap_mean(values.to_numpy()))
            for number, values in group[group["attack"] == name].groupby("round")["psnr"]
            if values.notna().any()
        ]
        x = np.array([number for number, _ in points], dtype=float)
        mean, low, high = (np.array([getattr(i, part) for _, i in points]) for part in ("mean", "low", "high"))
        if name in BASELINES:
            _draw_baseline(axes, name, x, mean, styles[name])
            continue
        # Side by side, so that intervals of attacks with equal scores stay visible.
        x = x + (attacks.index(name) - (len(attacks) - 1) / 2) * 0.06 * spacing
        error = np.nan_to_num(np.stack([mean - low, high - mean]).clip(min=0))
        axes.errorbar(x, mean, yerr=error, label=name, ms=4.5, lw=1.3, elinewidth=0.9, capsize=2, **styles[name])
    _round_axis(axes, rounds)
    silent = [name for name in group["attack"].unique() if name not in drawn]
    if silent:
        note = textwrap.fill(f"no image: {', '.join(silent)}", 40)
        axes.set_xlabel(f"Round\n{note}", fontsize=SMALL)


def _draw_baseline(axes: Axes, name: str, x: np.ndarray, mean: np.ndarray, style: dict[str, Any]) -> None:
    if len(x) == 1:  # a line through one point is invisible: draw the level instead
        axes.axhline(mean[0], label=name, lw=1.4, zorder=1, **style)
    else:
        axes.plot(x, mean, label=name, lw=1.4, zorder=1, **style)


def _round_axis(axes: Axes, rounds: list[float]) -> None:
    axes.set_xlabel("Round", fontsize=NORMAL)
    dress(axes, grid="y")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if len(rounds) == 1:
        axes.set_xlim(rounds[0] - 0.6, rounds[0] + 0.6)
        axes.set_xticks(rounds)


def dress(axes: Axes, grid: Literal["", "y", "both"] = "") -> None:
    """Small ticks and no upper or right frame, as in every figure of the project, with grid lines where asked for."""
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(axis=grid, color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)


def error_bars(axes: Axes, x: Any, table: pd.DataFrame, name: str = "", **look: Any) -> None:
    """Draw means with their intervals, a point each.

    Args:
        x: (n,) coordinates.
        table: n lines with the mean and the bounds of its interval: `name`, `name`_low and `name`_high, or mean, low
            and high where `name` is empty.
        look: keyword arguments of `Axes.errorbar`.
    """
    mean, low, high = (table[column] for column in ((name, f"{name}_low", f"{name}_high") if name else _BOUNDS))
    error = np.stack([mean - low, high - mean]).clip(min=0)
    axes.errorbar(x, mean, yerr=error, **{"elinewidth": 0.8, "capsize": 2} | look)


def _broken(name: str) -> str:
    """Two lines at most, broken at the underscore nearest the middle."""
    if len(name) <= 14 or "_" not in name:
        return name
    cut = min((i for i, letter in enumerate(name) if letter == "_"), key=lambda i: abs(i - len(name) / 2))
    return f"{name[: cut + 1]}\n{name[cut + 1 :]}"


def save(figure: Figure, path: str | os.PathLike[str], dpi: int = DPI) -> None:
    """Write a figure as PNG and PDF; equal figures give equal files."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Type 42 keeps the text selectable and is what publishers accept; no date, so equal data gives equal files.
    with mpl.rc_context({"pdf.fonttype": 42}):
        figure.savefig(path, dpi=dpi, facecolor="white", metadata={"Software": None})
        figure.savefig(path.with_suffix(".pdf"), facecolor="white", metadata={"CreationDate": None})
