"""What MJP hides from an adversary that knows it: leakage against gamma and against the number of updates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.metrics import bootstrap_mean
from fedmjp.report.figures import NORMAL, SMALL, draw_picture, save, style

GOOD = 25.0  # dB, an image that one would recognise


def adaptive_table(rows: pd.DataFrame, by: list[str], value: str = "psnr") -> pd.DataFrame:
    """Mean with 95 % interval, median, first decile (dB) and share above `GOOD`, by the columns `by`."""
    lines = []
    for key, group in rows.groupby(by, sort=False):
        values = group[value].to_numpy()
        interval = bootstrap_mean(values)
        finite = values[np.isfinite(values)]
        spread = np.quantile(finite, [0.5, 0.1]) if len(finite) else (np.nan, np.nan)
        numbers = {"mean": interval.mean, "low": interval.low, "high": interval.high, "median": spread[0]}
        numbers |= {"first_decile": spread[1], "share_good": float((finite > GOOD).mean()) if len(finite) else np.nan}
        seconds = {"seconds": group["seconds"].median(), "images": interval.count}
        lines.append(dict(zip(by, key, strict=True)) | numbers | seconds)
    return pd.DataFrame(lines)


def write_adaptive(rows: pd.DataFrame, out: Path) -> None:
    """Write one_update.csv and updates.csv (each where there are such rows) and leakage.png with its .pdf."""
    rows = rows.assign(
        gamma=[p["gamma"] for p in rows["defense_parameters"]],
        psnr_visible=[float(d.get("psnr_visible", np.nan)) for d in rows["details"]],
    ).sort_values(["gamma", "round"], kind="stable")
    # An attack over updates meets a single one too, where it does no more than the one-update attacks.
    over_rounds = rows["attack"].isin(rows.loc[rows["round"] > 1, "attack"].unique())
    first = rows[(rows["round"] == 1) & (rows["setting"] == "paper") & ~over_rounds]
    one = adaptive_table(first, ["attack", "gamma"])
    if len(one):
        visible = adaptive_table(first, ["attack", "gamma"], "psnr_visible")[["attack", "gamma", "mean", "median"]]
        one = one.merge(visible, on=["attack", "gamma"], suffixes=("", "_visible"))
    updates = adaptive_table(rows[over_rounds], ["attack", "setting", "gamma", "round"])
    for name, table in (("one_update", one), ("updates", updates)):
        if len(table):
            table.to_csv(out / f"{name}.csv", index=False, float_format="%.4g")
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    if len(one):
        _by_gamma(left, one)
    if len(updates):
        _by_updates(right, updates)
    left.set_ylabel("PSNR of the whole image (dB)", fontsize=NORMAL)
    left.set_ylim(bottom=0, auto=True)
    save(figure, out / "leakage.png")


def _by_gamma(axes: Axes, table: pd.DataFrame) -> None:
    for index, (attack, group) in enumerate(table.groupby("attack")):
        _line(axes, group["gamma"], group, attack, index)
    axes.set_xlabel("Masking ratio γ, one update", fontsize=NORMAL)
    _dress(axes)


def _by_updates(axes: Axes, table: pd.DataFrame) -> None:
    for index, gamma in enumerate(table["gamma"].unique()):
        own = table[table["gamma"] == gamma]
        for (attack, setting), group in own.groupby(["attack", "setting"], sort=False):
            label = f"γ = {gamma}" + (", released schedule" if setting == "released" else "")
            look = {"ls": ":" if setting == "released" else "-"}
            if attack != table["attack"].iloc[0]:
                label, look = f"{label}, {attack}", look | {"marker": "*", "ms": 9}
            _line(axes, group["round"], group, label, index, **look)
    axes.set_xscale("log")
    ticks = [t for t in (1, 2, 4, 8, 16, 32, 64) if t <= table["round"].max()]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("Updates of the same image", fontsize=NORMAL)
    _dress(axes)


def _line(axes: Axes, x: pd.Series, group: pd.DataFrame, label: str, index: int, **changes) -> None:
    error = np.stack([group["mean"] - group["low"], group["high"] - group["mean"]]).clip(min=0)
    look = style(index) | {"ms": 4, "lw": 1.3, "elinewidth": 0.8, "capsize": 2} | changes
    axes.errorbar(x, group["mean"], yerr=error, label=label, **look)


def _dress(axes: Axes) -> None:
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=SMALL - 1, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def round_by_round_figure(
    pictures: Mapping[str, tuple[Tensor, Mapping[int, Tensor]]], path: str | os.PathLike[str]
) -> None:
    """Draw photographs coming back: one row each, the original and then what is known after so many updates.

    Args:
        pictures: name -> (original (C, H, W) in [0, 1], number of updates -> reconstruction).
        path: the .png to write; a .pdf goes beside it.
    """
    counts = sorted({count for _, found in pictures.values() for count in found})
    cell, gap, head = 1.15, 0.08, 0.3  # inches
    width, height = (1 + len(counts)) * (cell + gap), head + len(pictures) * (cell + 0.24)
    figure = Figure(figsize=(width, height))
    for row, (original, found) in enumerate(pictures.values()):
        bottom = height - head - row * (cell + 0.24) - cell
        for column, count in enumerate([0, *counts]):
            picture = original if count == 0 else found.get(count)
            place = (column * (cell + gap) / width, bottom / height, cell / width, cell / height)
            axes = figure.add_axes(place)
            error = None if count == 0 or picture is None else float((picture - original).square().mean())
            draw_picture(axes, picture, None if error is None else -10 * np.log10(max(error, 1e-12)))
            if row == 0:
                title = "original" if count == 0 else f"{count} update{'s' * (count > 1)}"
                axes.set_title(title, fontsize=SMALL, pad=4)
    save(figure, path)
