"""Gradient matching in numbers: one line a model, batch, defence, attack and number of steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attacks.registry import UsageError
from fedmjp.audit.strongest import gains_over_guesses
from fedmjp.audit.verdict import judge
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import BASELINES
from fedmjp.report.figures import legend_below
from fedmjp.report.styles import GREY, MOST_LINES, NORMAL, SMALL, WIDTH, attack_style, dress, error_bars, save

BY = ["model", "weights", "defense", "gamma", "batch_size", "setting", "attack", "init", "steps"]
GUESS = "mean_image"
# Steps of the published experiments, and on what: Geiping et al. run at most 24,000, Hatamizadeh et al. 120,000.
PUBLISHED = {
    "inverting_gradients": (24_000, "published: CNNs"),
    "gradvit": (120_000, "published: ViT-B, batch of 8, CNN prior"),
}


def matching_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a case.

    Args:
        rows: as `load_rows` gives them, with table flags or without.

    Raises:
        UsageError: rows that differ in what the table does not show (other parameters of an attack or a defence).

    Returns:
        The columns `BY`, `count` (of images), for psnr, ssim, lpips and label_accuracy M_mean with M_low and M_high
        (95 % bootstrap interval), `gain_mean` with `gain_low` and `gain_high` (dB over the best guess without a
        gradient on the same images, where the answer is compared with the original), `verdict` (of
        `fedmjp.audit.verdict`, on this attack alone), `seconds_median` an update, `flags` and `diagnosis`.
    """
    rows = rows.assign(
        gamma=[p.get("gamma", 0.0) for p in rows["defense_parameters"]],
        init=[p.get("init", "") for p in rows["attack_parameters"]],
        steps=[p.get("steps", 0) for p in rows["attack_parameters"]],
        label_accuracy=[float(d.get("label_accuracy", np.nan)) for d in rows["details"]],
    )
    twice = rows.duplicated([*BY, "seed", "image_id"])
    if twice.any():
        raise UsageError(
            f"the rows hold {rows[twice]['attack'].iloc[0]!r} with several parameters of the attack or the defence; "
            "give each a folder of its own (--out)"
        )
    guesses = rows[rows["attack"].isin(BASELINES)]
    lines = [_line(dict(zip(BY, key, strict=True)), group, guesses) for key, group in rows.groupby(BY, sort=False)]
    order = ["model", "batch_size", "gamma", "setting", "steps", "init"]
    return pd.DataFrame(lines).sort_values(order, kind="stable").reset_index(drop=True)


def _line(line: dict, group: pd.DataFrame, guesses: pd.DataFrame) -> dict:
    line["count"] = int(group["psnr"].notna().sum())
    for name in ("psnr", "ssim", "lpips", "label_accuracy"):
        line |= _interval(name, group[name].to_numpy(float))
    gains, line["verdict"] = np.array([]), ""
    if line["setting"] == "original" and line["attack"] not in BASELINES:
        like = guesses[guesses["batch_size"] == line["batch_size"]]
        compared = pd.concat([group, like[like["image_id"].isin(group["image_id"])]])
        gains = gains_over_guesses(compared)[line["attack"]].to_numpy()
        line["verdict"] = str(judge(compared).answer)
    line |= _interval("gain", gains)
    line["seconds_median"] = group["seconds"].median()
    line["flags"] = " ".join(sorted({flag for flags in group["flags"] for flag in flags}))
    line["diagnosis"] = next((d for d in group["diagnosis"] if d), "")
    return line


def _interval(name: str, values: np.ndarray) -> dict[str, float]:
    interval = bootstrap_mean(values)
    return {f"{name}_mean": interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def matching_figure(table: pd.DataFrame, path: Path) -> None:
    """Draw PSNR against steps, images in the batch, and gamma, each on its own scale, where there are several.

    Of each the six attacks that come nearest.
    """
    original = table[table["setting"] == "original"]
    own, defended = original[original["defense"] == "none"], original[original["defense"] != "none"]
    alone = own[own["batch_size"] == 1]
    swept = defended[(defended["batch_size"] == 1) & (defended["gamma"] > 0)]
    budget = _common_budget(table)
    at = lambda lines: lines[lines["steps"].isin([0, budget])]  # noqa: E731
    guess = table[(table["attack"] == GUESS) & (table["batch_size"] == 1)].head(1)
    panels = [
        (alone[alone["steps"] > 0], "steps", "Steps,\none image, no defence"),
        (at(own), "batch_size", f"Images in the batch,\n{budget} steps"),
        (at(pd.concat([alone, swept])), "gamma", f"MJP's γ,\none image, {budget} steps"),
    ]
    panels = [panel for panel in panels if panel[0][panel[1]].nunique() > 1] or panels[1:2]  # a curve has two points
    figure = Figure(figsize=(WIDTH if len(panels) > 1 else 0.7 * WIDTH, 3.9), layout="constrained")
    for axes, (lines, by, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, lines, guess, by, label)
    figure.axes[0].set_ylabel("PSNR against the original (dB)", fontsize=NORMAL)
    legend_below(figure, figure.axes, columns=3 if len(panels) > 1 else 2)
    save(figure, path)


def _common_budget(table: pd.DataFrame) -> int:
    """The budget that most lines have."""
    budgets = table["steps"][table["steps"] > 0]
    return int(budgets.mode().iloc[0]) if len(budgets) else 0


def _panel(axes: Axes, table: pd.DataFrame, guess: pd.DataFrame, by: str, label: str) -> None:
    searched = table[~table["attack"].isin(BASELINES)]
    lines = {key: group.sort_values(by) for key, group in searched.groupby(["attack", "init"], sort=False)}
    nearest = sorted(lines, key=lambda key: lines[key]["psnr_mean"].max(), reverse=True)[:MOST_LINES]
    for attack, init in nearest:
        group = lines[attack, init]
        chosen = init not in ("", "randn")
        name = f"{attack} from {init}" if chosen else attack
        changes = {"ms": 4, "lw": 1.3} | ({"ls": ":"} if chosen else {})
        error_bars(axes, group[by], group, "psnr", label=name, **attack_style(attack) | changes)
    if len(guess):
        axes.axhline(guess["psnr_mean"].iloc[0], label=GUESS, lw=1, **attack_style(GUESS))
        axes.axhspan(guess["psnr_low"].iloc[0], guess["psnr_high"].iloc[0], color=GREY, alpha=0.12, lw=0, zorder=0)
    if by != "gamma":
        axes.set_xscale("log", base=2)
        ticks = sorted(searched[by].unique())
    if by == "steps":
        for attack in dict.fromkeys(attack for attack, _ in nearest if attack in PUBLISHED):
            steps, on_what = PUBLISHED[attack]
            axes.axvline(steps, lw=1, ls=":", color=attack_style(attack)["color"])
            text = {"fontsize": SMALL, "rotation": 90, "ha": "right", "va": "bottom", "color": GREY}
            axes.annotate(on_what, (steps, 0.02), xycoords=("data", "axes fraction"), **text)
            ticks.append(steps)
    if by != "gamma":
        ticks = sorted(set(ticks))
        axes.set_xticks(ticks, [f"{t // 1000}k" if t >= 1e4 else str(t) for t in ticks])
        axes.minorticks_off()
    axes.set_xlabel(label if len(lines) <= MOST_LINES else f"{label},\nthe six nearest of {len(lines)}", fontsize=SMALL)
    dress(axes, grid="both")
