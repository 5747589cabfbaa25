"""What is rendered from the rows of the attacks that know the defence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.adaptive.table import adaptive_tables, leakage_figure, mask_table, time_table
from experiments.rendering import MEAN, Rendering, answered, csv, interval, markdown_table, read_rows

IN_TIME = 5.0  # seconds


def adaptive_files(folder: Path) -> dict[str, str]:
    """one_update.csv and updates.csv, each where there are such rows."""
    tables = zip(("one_update.csv", "updates.csv"), adaptive_tables(read_rows(folder)), strict=True)
    return {name: csv(table, 4) for name, table in tables if len(table)}


def adaptive_block(folder: Path) -> str:
    """One table against gamma, one against the number of updates, each where it was written."""
    tables = (("one_update.csv", _one_update), ("updates.csv", _over_updates))
    return "\n\n".join(make(pd.read_csv(folder / name)) for name, make in tables if (folder / name).exists())


def _one_update(table: pd.DataFrame) -> str:
    lines, exact = [], bool(table["psnr_visible_exact_median"].notna().any())
    for _, row in table.sort_values(["gamma", "attack"], ascending=[True, False]).iterrows():
        mean = f"{interval(row, 'psnr', 1, MEAN)}, median {row.psnr_median:.1f}{answered(row)}"
        cells = [
            f"{row.gamma}",
            f"`{row.attack}`",
            mean,
            f"median {row.psnr_visible_median:.1f}",
            *([_median(row.psnr_visible_exact_median)] if exact else []),
            _patches(row),
            _images(row),
        ]
        lines.append(cells)
    heads = ["one update, γ", "attack", "whole image (dB)", "visible patches (dB)"]
    heads += ["whole image, visible patches exact (dB)"] if exact else []
    return markdown_table([*heads, "patches above 25 dB, median (in any order)", "images"], lines)


def _median(value: float) -> str:
    return "" if np.isnan(value) else f"median {value:.1f}"


def _patches(row: pd.Series) -> str:
    """The share of patches in their places, and in any order where the attack guesses it."""
    placed, found = row.patch_recovery_median, row.patches_any_order_median
    return f"{placed:.0%}" if np.isnan(found) else f"{placed:.0%} ({found:.0%})"


def _images(row: pd.Series) -> str:
    """How many images a line is of, and under how many seeds of weights and masks where there are several."""
    return f"{row['count']:.0f}" + (f", {row['seeds']:.0f} seeds" if row["seeds"] > 1 else "")


def _over_updates(table: pd.DataFrame) -> str:
    lines = []
    for (gamma, schedule, attack), own in table.groupby(["gamma", "setting", "attack"], sort=False):
        columns = {"updates": ".0f", "psnr_median": ".1f", "psnr_first_decile": ".1f", "psnr_share_recognisable": ".0%"}
        cells = [", ".join(format(value, form) for value in own[name]) for name, form in columns.items()]
        cells[1] = ", ".join(f"{row.psnr_median:.1f}{answered(row)}" for _, row in own.iterrows())
        cells[-1] += f" of {_images(own.iloc[own['count'].argmax()])}"
        lines.append([f"{gamma}, {schedule}", f"`{attack}`", *cells])
    heads = ["γ, schedule", "attack", "after so many updates", "median (dB)", "first decile (dB)"]
    return markdown_table([*heads, "images above 25 dB"], lines)


def _figures(folder: Path) -> None:
    leakage_figure(*adaptive_tables(read_rows(folder)), folder / "leakage.png")


def _rendering(folder: str, block: str) -> Rendering:
    return Rendering(folder, adaptive_files, {block: adaptive_block}, _figures)


def mask_files(folder: Path) -> dict[str, str]:
    """table.csv of a run with --mask-choices: leakage by masking ratio, choice of masks, attack and updates."""
    return {"table.csv": csv(mask_table(read_rows(folder)), 4)}


def mask_block(folder: Path) -> str:
    """One line an attack, one column a choice of masks."""
    table = pd.read_csv(folder / "table.csv")
    choices = list(table["mask_choice"].unique())
    lines = []
    for (gamma, attack, updates), group in table.groupby(["gamma", "attack", "updates"], sort=False):
        own = group.set_index("mask_choice")
        cells = [_mean(own.loc[name]) if name in own.index else "" for name in choices]
        lines.append([f"{gamma:g}", f"`{attack}`", f"{updates}", *cells, f"{group['count'].max():.0f}"])
    return markdown_table(["γ", "attack", "updates", *(f"`{name}`" for name in choices), "images"], lines)


def _mean(line: pd.Series) -> str:
    return interval(line, "psnr", 1, MEAN) + answered(line)


def time_files(folder: Path) -> dict[str, str]:
    """table.csv: seconds of an answer from one update, by masking ratio and attack."""
    return {"table.csv": csv(time_table(read_rows(folder), IN_TIME), 4)}


def time_block(folder: Path) -> str:
    """The table as Markdown."""
    table = pd.read_csv(folder / "table.csv")
    lines = [
        [
            f"{row.gamma:g}",
            f"`{row.attack}`",
            f"{row.seconds_median:.1f}",
            f"{row.seconds_min:.1f}",
            f"{row.seconds_max:.1f}",
            f"{row.in_time} of {row['count']}",
            f"{row.psnr_median:.1f}{answered(row)}",
            f"{row.psnr_share_recognisable:.0%}",
        ]
        for _, row in table.iterrows()
    ]
    heads = ["γ", "attack", "seconds, median", "shortest", "longest", f"at most {IN_TIME:g} s"]
    return markdown_table([*heads, "median (dB)", "images above 25 dB"], lines)


MASKS = Rendering("mjp_masks", mask_files, {"mjp_masks": mask_block})
TIMES = Rendering("mjp_adaptive_two_threads", time_files, {"adaptive_two_threads": time_block})


RENDERINGS = (
    _rendering("mjp_adaptive", "adaptive"),
    _rendering("mjp_adaptive_mixture", "adaptive_mixture"),
    _rendering("mjp_adaptive_mixture_fitted", "adaptive_mixture_fitted"),
    _rendering("mjp_adaptive_released", "adaptive_released"),
    _rendering("mjp_adaptive_trained", "adaptive_trained"),
    _rendering("mjp_adaptive_long", "adaptive_long"),
    _rendering("mjp_adaptive_vit_ti", "adaptive_vit_ti"),
    _rendering("mjp_adaptive_fine_tuned", "adaptive_fine_tuned"),
    _rendering("mjp_adaptive_vit_ti_224", "adaptive_vit_ti_224"),
    MASKS,
    TIMES,
)
