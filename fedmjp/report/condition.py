"""PSNR against the condition number of the system an attack solved: how much of a failure is round-off.

A relative error u in the gradient comes back as an error of up to u times the condition number. The guide in the figure
is that product for float32 (u = 2^-24) and an image of unit size, in dB: points along it are limited by round-off,
points far below it by something else.
"""

from __future__ import annotations

import os

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedmjp.report.figures import NORMAL, SMALL, save, style

FLOAT32_UNIT = 2.0**-24
GUIDE = "float32 round-off × condition number"


def condition_figure(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Draw one point an image, a panel an attack, a colour a model.

    Args:
        rows: columns `attack`, `line` (the model's label), `condition`, `psnr` (dB); points without both are left out.
        path: the .png to write; a .pdf goes beside it.

    Raises:
        ValueError: no point to draw.
    """
    points = rows[np.isfinite(rows["condition"]) & np.isfinite(rows["psnr"])]
    if points.empty:
        raise ValueError("condition_figure needs rows with a condition number and a PSNR")
    attacks, models = list(points["attack"].unique()), list(points["line"].unique())
    figure = Figure(figsize=(0.6 + 3.1 * len(attacks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(attacks), sharey=True, squeeze=False)[0]
    for axes, attack in zip(panels, attacks, strict=True):
        own = points[points["attack"] == attack]
        for index, model in enumerate(models):
            chosen, look = own[own["line"] == model], style(index)
            marks = {"color": look["color"], "marker": look["marker"]}
            axes.scatter(chosen["condition"], chosen["psnr"], s=9, alpha=0.6, lw=0, label=model, **marks)
        x = np.geomspace(own["condition"].min(), own["condition"].max(), 50)
        axes.plot(x, -20 * np.log10(x * FLOAT32_UNIT), color="#404040", lw=1, ls="--", label=GUIDE)
        axes.set_xscale("log")
        axes.set_title(attack, fontsize=NORMAL)
        axes.set_xlabel("Condition number of the position gradient", fontsize=SMALL)
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("PSNR (dB), higher = more leakage", fontsize=NORMAL)
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=3, fontsize=SMALL, frameon=False, markerscale=2
    )
    save(figure, path)
