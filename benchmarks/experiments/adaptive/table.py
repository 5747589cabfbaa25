"""Leakage against the strength of a defence and against the number of updates: tables and figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attacks.observation import ORDER_GUESSED
from experiments.rendering import spread_table
from fedmjp.records.rows import ANY_PLACE
from fedmjp.report.pictures import draw_picture
from fedmjp.report.styles import MOST_LINES, NORMAL, SMALL, WIDTH, attack_style, defence_colour, dress, error_bars, save


def adaptive_tables(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(leakage in one update by attack and gamma, leakage by number of updates); gamma is 0 for defences without it.

    Settings that differ from a schedule in the masks as released or in a warm-up say so in the column `setting`.
    Columns: those of `spread_table` in dB, and for one update `psnr_visible_mean` and `psnr_visible_median`, over the
    patches whose position is not hidden, `psnr_visible_exact_median`, over all if those were exact (NaN where rows are
    from before it was measured), and medians of the share of patches above 25 dB, `patch_recovery_median` in their
    places and `patches_any_order_median` in any order (NaN for attacks that guess no order).
    """
    parts = ("psnr_visible", "psnr_visible_exact")
    rows = rows.assign(
        gamma=[p.get("gamma", 0.0) for p in rows["defense_parameters"]],
        **{name: pd.to_numeric(pd.Series([d.get(name) for d in rows["details"]], index=rows.index)) for name in parts},
    ).sort_values(["gamma", "round"], kind="stable")
    # Attacks over updates also attack the first one, where they do no more than the one-update attacks.
    over_rounds = rows["attack"].isin(rows.loc[rows["round"] > 1, "attack"].unique())
    first = rows[(rows["round"] == 1) & (rows["setting"] == "paper") & ~over_rounds]
    one = spread_table(first, ["attack", "gamma"])
    if len(one):
        by = ["attack", "gamma"]
        visible = spread_table(first, by, "psnr_visible")[[*by, "psnr_visible_mean", "psnr_visible_median"]]
        exact = first.groupby(by)["psnr_visible_exact"].agg(lambda own: own.median(skipna=False))
        exact = exact.rename("psnr_visible_exact_median").reset_index()
        one = one.merge(visible, on=by).merge(exact, on=by).merge(_shares_of_patches(first, by), on=by)
    over = rows[over_rounds].rename(columns={"round": "updates"})
    over["setting"] = [
        _in_words(schedule, options)
        for schedule, options in zip(over["setting"], over["defense_parameters"], strict=True)
    ]
    return one, spread_table(over, ["attack", "setting", "gamma", "updates"])


def _shares_of_patches(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Medians of the shares of patches above 25 dB, by `by`; see `adaptive_tables`."""
    placed = rows["patch_recovery"].astype(float)
    guessed = pd.Series([ORDER_GUESSED in flags for flags in rows["flags"]], index=rows.index)
    shares = rows[by].assign(
        patch_recovery_median=placed,
        patches_any_order_median=rows[ANY_PLACE].astype(float).where(guessed, placed),
        guessed=guessed,
    )
    table = shares.groupby(by, sort=False).agg(
        {"patch_recovery_median": "median", "patches_any_order_median": "median", "guessed": "any"}
    )
    table["patches_any_order_median"] = table["patches_any_order_median"].where(table.pop("guessed"))
    return table.reset_index()


def mask_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Leakage by gamma, attack, updates and choice of masks: the columns of `spread_table`, and lpips_mean."""
    rows = rows.rename(columns={"round": "updates"}).assign(
        gamma=[p["gamma"] for p in rows["defense_parameters"]],
        mask_choice=[p.get("mask_choice", "block") for p in rows["defense_parameters"]],
    )
    by = ["gamma", "attack", "updates", "mask_choice"]
    lpips = rows.astype({"lpips": float}).groupby(by)["lpips"].mean().rename("lpips_mean").reset_index()
    return spread_table(rows, by).merge(lpips, on=by).sort_values(by[:3], kind="stable")


def time_table(rows: pd.DataFrame, limit: float) -> pd.DataFrame:
    """Seconds of an answer by gamma and attack, how many took at most `limit` seconds (in_time), and their leakage."""
    rows = rows.assign(gamma=[p["gamma"] for p in rows["defense_parameters"]])
    by = ["gamma", "attack"]
    seconds = rows.groupby(by)["seconds"]
    table = pd.DataFrame(
        {
            "seconds_median": seconds.median(),
            "seconds_min": seconds.min(),
            "seconds_max": seconds.max(),
            "in_time": seconds.agg(lambda own: int((own <= limit).sum())),
        }
    )
    leaks = spread_table(rows, by)[[*by, "psnr_median", "psnr_share_recognisable", "count", "failed"]]
    return table.reset_index().merge(leaks, on=by)


def _in_words(schedule: str, defense: Mapping[str, Any]) -> str:
    """A row's schedule, and what else of the released code its defence takes over (options younger than some rows)."""
    masks = ", released masks" if defense.get("mask_sampler") == "released" else ""
    warmup = defense.get("jigsaw_warmup")
    return f"{schedule}{masks}{f', warm-up {warmup}' if warmup else ''}"


def leakage_figure(one: pd.DataFrame, updates: pd.DataFrame, path: Path) -> None:
    """Draw both tables of `adaptive_tables`: against gamma, and against updates with a panel a schedule of masks."""
    schedules = list(updates["setting"].unique()) if len(updates) else []
    panels = bool(len(one)) + len(schedules)
    figure = Figure(figsize=(max(4.0, 2.35 * panels), 3.6), layout="constrained")
    axes = list(figure.subplots(1, max(1, panels), sharey=True, squeeze=False)[0])
    if len(one):
        _by_gamma(axes[0], one)
    for panel, schedule in zip(axes[bool(len(one)) :], schedules, strict=True):
        _by_updates(panel, updates[updates["setting"] == schedule])
        panel.set_title(f"{schedule} schedule", fontsize=NORMAL)
    axes[0].set_ylabel("PSNR of the whole image (dB)", fontsize=NORMAL)
    axes[0].set_ylim(bottom=0, auto=True)
    save(figure, path)


def _by_gamma(axes: Axes, table: pd.DataFrame) -> None:
    best = table.groupby("attack")["psnr_mean"].max().dropna().sort_values(ascending=False)
    for attack in sorted(best.index[:MOST_LINES]):
        group = table[table["attack"] == attack]
        error_bars(axes, group["gamma"], group, "psnr", label=attack, **attack_style(attack) | {"ms": 4, "lw": 1.3})
    words = f",\nthe six strongest of {len(best)} attacks" if len(best) > MOST_LINES else ""
    axes.set_xlabel(f"Masking ratio γ{words}", fontsize=NORMAL)
    axes.set_title("one update", fontsize=NORMAL)
    _dress(axes)


def _by_updates(axes: Axes, table: pd.DataFrame) -> None:
    for gamma in table["gamma"].unique():
        own = table[table["gamma"] == gamma]
        for attack, group in own.groupby("attack", sort=False):
            line = {"color": defence_colour("mjp", ("gamma", gamma)), "marker": attack_style(attack)["marker"]}
            error_bars(axes, group["updates"], group, "psnr", label=f"{attack}, γ {gamma:g}", ms=4, lw=1.3, **line)
    axes.set_xscale("log")
    ticks = [t for t in (1, 2, 4, 8, 16, 32, 64) if t <= table["updates"].max()]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("Updates of the same image", fontsize=NORMAL)
    _dress(axes)


def _dress(axes: Axes) -> None:
    dress(axes, grid="both")
    axes.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def round_by_round_figure(
    pictures: Mapping[str, tuple[Tensor, Mapping[int, Tensor | None]]], path: str | os.PathLike[str]
) -> None:
    """Draw photographs, one row each: the original, and its reconstruction after so many updates.

    Args:
        pictures: name -> (original (C, H, W) in [0, 1], number of updates -> reconstruction, or None).
        path: the .png to write; a .pdf goes beside it.
    """
    counts = sorted({count for _, found in pictures.values() for count in found})
    gap, head = 0.08, 0.3  # inches
    cell = min(1.15, WIDTH / (1 + len(counts)) - gap)
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
