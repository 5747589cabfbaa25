"""PSNR against the condition number of the system an attack solved: how much of a failure is round-off.

A relative error u of the gradient becomes an error of up to u times the condition number in the image. The line in the
figure is that worst case for float32 (u = 2^-24) and an image of unit size, in dB. Where points follow the line,
round-off limits the attack; the same attack on float64 gradients then lies far above.
"""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedmjp.report.styles import NORMAL, SMALL, dress, save, style

FLOAT32_UNIT = 2.0**-24
GUIDE = "worst case of float32 round-off"


def condition_figure(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draw one point an image, a panel for each block and attack whose equation holds there, a colour a model.

    Args:
        rows: columns `block`, `attack`, `line` (the model's label), `condition`, `psnr` (dB), `diagnosis`; rows with a
            diagnosis, or without numbers, are left out.
        path: the .png to write; a .pdf goes beside it.

    Raises:
        ValueError: no point to draw.
    """
    points = rows[np.isfinite(rows["condition"]) & np.isfinite(rows["psnr"]) & (rows["diagnosis"] == "")]
    if points.empty:
        raise ValueError("condition_figure needs rows with a condition number and a PSNR")
    groups = list(points.groupby(["block", "attack"], sort=False))
    styles = {model: style(index) for index, model in enumerate(points["line"].unique())}
    figure = Figure(figsize=(max(5.0, 0.6 + 2.6 * len(groups)), 3.9), layout="constrained")
    panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    bounds = np.array([points["condition"].min() / 2, points["condition"].max() * 2])
    for axes, ((block, attack), own) in zip(panels, groups, strict=True):
        for model, chosen in own.groupby("line", sort=False):
            marks = {"color": styles[model]["color"], "marker": styles[model]["marker"]}
            axes.scatter(chosen["condition"], chosen["psnr"], s=9, alpha=0.5, lw=0, label=model, **marks)
        axes.plot(bounds, -20 * np.log10(bounds * FLOAT32_UNIT), color="#404040", lw=1, ls="--", label=GUIDE)
        axes.set_title(f"{attack}, {block} block", fontsize=NORMAL)
        _log_axis(axes)
    panels[0].set_ylim(0, 1.05 * points["psnr"].max())
    panels[0].set_ylabel("PSNR (dB), higher = more leakage", fontsize=NORMAL)
    handles = {h.get_label(): h for axes in panels for h in axes.get_legend_handles_labels()[0]}
    shown = [name for name in (*styles, GUIDE) if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=min(len(shown), 1 + len(groups)),
        fontsize=SMALL,
        frameon=False,
        markerscale=2,
    )
    save(figure, path)


def _log_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Condition number", fontsize=SMALL)
    dress(axes, grid="both")
