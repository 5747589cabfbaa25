"""What is rendered from the rows of models that clients have checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.detect.options import ADAPTIVE
from experiments.rendering import Rendering, csv, markdown_table, read_rows
from fedmjp.audit.verdict import RECOGNISABLE
from fedmjp.detect import STATISTICS, calibrate
from fedmjp.records.rows import PROVENANCE, Schema
from fedmjp.report.styles import NORMAL, SMALL, WIDTH, attack_style, dress, save, style

HONEST = ""  # `attack` of a model that an honest server sent
CASE = (
    *("dataset", "model", "weights", "start", "defense", "purpose", "partition", "update", "optimizer"),
    *("learning_rate", "batch_size", "local_steps", "clients", "train_limit", "seed", "threat_model", "attack"),
    *("attack_parameters", "place", "probe", "round", "client"),
)
# `place` is the checking client's in the group of clients whose sum the server sees: 0 is attacked, the others are sent
# what keeps them silent. `statistics` holds every statistic's value, null for no statement, and `unstated` why; `psnr`
# (dB) is that of the best image that an attack returned, `recovered` how many are above 25 dB; `seconds` the check's.
ROWS = Schema(
    keys=(
        *dict.fromkeys((*PROVENANCE, *CASE)),
        *("statistics", "unstated", "psnr", "recovered", "seconds", "diagnosis"),
    ),
    identity=CASE,
    optional={"defense": "none", "place": 0},
)
SENT = "sent"  # what a server does, in words
SCORE = "score"  # the largest statistic in units of its threshold
REST = "score_rest"  # the same without the statistics that a server gets around
# Small steps over many rounds pass those that compare with the last model; a bias may be moved into the weights.
EVADED = ("row_norms", "distance", "bias_range")
WEAK = 0.2  # strength of `fishing` at which the statistics are compared
FEDERATION = ["dataset", "model", "start", "defense", "partition", "update", "seed"]


def read_checks(folder: Path) -> tuple[pd.DataFrame, dict[str, float]]:
    """The rows with a column for each statistic (NaN for no statement), `SENT`, `SCORE` and `REST`; the thresholds."""
    rows = read_rows(folder, ROWS)
    rows[SENT] = [_named(*one) for one in zip(rows["attack"], rows["attack_parameters"], rows["place"], strict=True)]
    values = pd.DataFrame(list(rows["statistics"]), index=rows.index, columns=list(STATISTICS)).astype(float)
    rows = rows.join(values)
    honest = rows[rows["purpose"] == "calibration"]
    thresholds = calibrate({name: honest[name].dropna().tolist() for name in STATISTICS})
    scores = pd.concat({name: rows[name] / limit for name, limit in thresholds.items()}, axis=1)
    rows[SCORE], rows[REST] = scores.max(axis=1), scores.drop(columns=list(EVADED)).max(axis=1)
    return rows, thresholds


def _named(attack: str, parameters: Mapping[str, Any], place: int) -> str:
    """The attack, with the local steps that it is set for, and whether the client is one of those that it silences."""
    steps = parameters.get("local_steps", "one")
    return attack + f", local_steps={steps}" * (steps != "one") + ", single_out: to the others" * (place > 0)


def auc(suspicious: Sequence[float], honest: Sequence[float]) -> float:
    """Area under the ROC curve: how often the first are above the second, ties counting half (Mann and Whitney)."""
    first, second = np.asarray(suspicious, float), np.sort(np.asarray(honest, float))
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    if not len(first) or not len(second):
        return float("nan")
    below, up_to = (np.searchsorted(second, first, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(second)))


def detect_files(folder: Path) -> dict[str, str]:
    """thresholds.csv, table.csv (by attack) and curve.csv (by strength)."""
    rows, thresholds = read_checks(folder)
    attacked, honest = rows[rows["attack"] != HONEST], _honest(rows, "evaluation")
    strengths = attacked["attack_parameters"].map(lambda p: p.get("strength", 1.0))
    places = {name: place for place, name in enumerate(attacked["defense"].unique())}
    groups = sorted(attacked[strengths == 1].groupby(["defense", SENT], sort=False), key=lambda g: places[g[0][0]])
    lines = [_line(*names, own, honest) for names, own in groups]
    full = attacked[(strengths == 1) & (attacked[SENT] == ADAPTIVE) & (attacked["probe"] > 1)]
    full = full[full["defense"] == "none"]
    weaker = attacked[strengths < 1].assign(strength=strengths)
    curve = pd.concat([weaker, full.assign(strength=1.0)])
    return {
        "thresholds.csv": csv(_thresholds(rows, thresholds), 4),
        "table.csv": csv(pd.DataFrame(lines), 4),
        "curve.csv": csv(pd.DataFrame(_curve(curve, honest)), 4),
    }


def thresholds_block(folder: Path) -> str:
    """One line a statistic: the largest honest values, the threshold and the false alarms."""
    table = pd.read_csv(folder / "thresholds.csv")
    heads = ["statistic", "largest in calibration", "threshold", "largest in evaluation", "false alarms"]
    lines = [
        [f"`{r.statistic}`", f"{r.calibration_max:.3g}", f"{r.threshold:.3g}", f"{r.evaluation_max:.3g}"]
        + [f"{r.alarms} of {r.checks}"]
        for r in table.itertuples()
    ]
    return markdown_table(heads, lines)


def false_alarms_block(folder: Path) -> str:
    """How many honest rounds there were, and how many alarmed."""
    rows, _ = read_checks(folder)
    parts = []
    for purpose in ("calibration", "evaluation"):
        own = _honest(rows, purpose)
        alarms = own.assign(alarm=own[SCORE] > 1)
        rounds = alarms.groupby([*FEDERATION, "round"])["alarm"].any()
        federations = own.groupby(FEDERATION).ngroups
        parts.append(
            f"{purpose}: {int(rounds.sum())} of {len(rounds)} honest rounds of {federations} federations with an alarm "
            f"({int(alarms['alarm'].sum())} of {len(own)} checks)"
        )
    return f"{'; '.join(parts)}."


def table_block(folder: Path) -> str:
    """One line an attack: share of its models that alarm, and areas under the ROC curves."""
    table = pd.read_csv(folder / "table.csv")
    names = list(STATISTICS)
    heads = ["attack", "defence", "models checked", "alarm", "AUC of the score", *(f"`{name}`" for name in names)]
    lines = []
    for _, row in table.iterrows():
        cells = [f"`{row['attack']}`", row["defense"], f"{row['checks']}", f"{row['flagged']:.0%}", f"{row['auc']:.3f}"]
        lines.append(cells + ["" if pd.isna(row[f"auc_{n}"]) else f"{row[f'auc_{n}']:.2f}" for n in names])
    return markdown_table(heads, lines)


def curve_block(folder: Path) -> str:
    """One line a strength: what it yields of each kind of training, and how often it is noticed in all of them."""
    table = pd.read_csv(folder / "curve.csv")
    table["training"] = table["model"] + ", " + table["start"]
    kinds = list(dict.fromkeys(table["training"]))
    heads = ["strength", *kinds, "above 25 dB", "alarm", "AUC, least", "alarm of the rest", "AUC of the rest, least"]
    lines = []
    for strength, own in table.groupby("strength"):
        psnr, checks = own.set_index("training")["psnr_median"].reindex(kinds), own["checks"].sum()
        cells = [f"{strength:g}", *(f"{value:.1f} dB" for value in psnr), f"{own['recovered'].sum()} of {checks}"]
        for end in ("", "_rest"):
            noticed = (own[f"flagged{end}"] * own["checks"]).sum() / checks
            cells += [f"{noticed:.0%}", f"{own[f'auc{end}'].min():.2f}"]
        lines.append(cells)
    return markdown_table(heads, lines)


def detect_figures(folder: Path) -> None:
    """Draw roc.png and curve.png."""
    rows, _ = read_checks(folder)
    _roc_figure(rows, folder / "roc.png")
    _curve_figure(pd.read_csv(folder / "curve.csv"), folder / "curve.png")


def _honest(rows: pd.DataFrame, purpose: str) -> pd.DataFrame:
    return rows[(rows["attack"] == HONEST) & (rows["purpose"] == purpose)]


def _thresholds(rows: pd.DataFrame, thresholds: dict[str, float]) -> pd.DataFrame:
    calibration, evaluation = _honest(rows, "calibration"), _honest(rows, "evaluation")
    lines = []
    for name, threshold in thresholds.items():
        stated = evaluation[name].dropna()
        line = {"statistic": name, "calibration_max": calibration[name].max(), "threshold": threshold}
        line |= {"evaluation_max": stated.max(), "alarms": int((stated > threshold).sum()), "checks": len(stated)}
        lines.append(line)
    return pd.DataFrame(lines)


def _line(defense: str, name: str, own: pd.DataFrame, honest: pd.DataFrame) -> dict:
    """One line of table.csv."""
    line = {
        "defense": defense,
        "attack": name,
        "checks": len(own),
        "flagged": (own[SCORE] > 1).mean(),
        "auc": auc(own[SCORE], honest[SCORE]),
    }
    line |= {f"auc_{statistic}": auc(own[statistic], honest[statistic]) for statistic in STATISTICS}
    return line | {"psnr_median": own["psnr"].median()}


def _curve(rows: pd.DataFrame, honest: pd.DataFrame) -> list[dict]:
    """Yield and detection by start and strength, of clients that send gradients."""
    lines = []
    keys = ["model", "start", "strength"]
    for (model, start, strength), own in rows[rows["update"] == "gradient"].groupby(keys, sort=True):
        line = {
            "model": model,
            "start": start,
            "strength": strength,
            "checks": len(own),
            "psnr_median": own["psnr"].median(),
        }
        line["recovered"] = int((own["recovered"].astype(float) > 0).sum())
        for name, end in ((SCORE, ""), (REST, "_rest")):
            line |= {f"flagged{end}": (own[name] > 1).mean(), f"auc{end}": auc(own[name], honest[name])}
            line[f"{name}_median"] = own[name].median()
        lines.append(line)
    return lines


def _roc_figure(rows: pd.DataFrame, path: Path) -> None:
    """ROC curves: of the score, for the attacks and for `fishing` of less strength; of each statistic at `WEAK`."""
    honest, attacked = _honest(rows, "evaluation"), rows[rows["attack"] != HONEST]
    strengths = attacked["attack_parameters"].map(lambda p: p.get("strength", 1.0))
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    curves = {n: roc(own[SCORE], honest[SCORE]) for n, own in attacked[strengths == 1].groupby(SENT, sort=False)}
    while curves:  # attacks of the same curve share a line
        name, curve = next(iter(curves.items()))
        same = [other for other, found in curves.items() if _corners(found) == _corners(curve)]
        left.plot(*curve, label=fill("; ".join(same), 44), **(attack_style(name) | {"marker": "", "lw": 3}))
        curves = {other: found for other, found in curves.items() if other not in same}
    for index, strength in enumerate(s for s in sorted(set(strengths)) if s <= WEAK):
        found = roc(attacked[strengths == strength][SCORE], honest[SCORE])
        left.plot(*found, label=f"fishing, strength {strength:g}", **(style(index) | {"marker": ""}))
    for index, name in enumerate(STATISTICS if (strengths == WEAK).any() else ()):
        found = roc(attacked[strengths == WEAK][name], honest[name])
        right.plot(*found, label=name, **(style(index) | {"marker": ""}))
    left.set_title("all statistics together", fontsize=NORMAL)
    right.set_title(f"each statistic, fishing of strength {WEAK:g}", fontsize=NORMAL)
    left.set_ylabel("share of prepared models", fontsize=NORMAL)
    for axes in (left, right):
        axes.set_xlabel("share of honest models", fontsize=NORMAL)
        if axes.lines:
            axes.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        dress(axes, "both")
    save(figure, path)


def roc(suspicious: pd.Series, honest: pd.Series) -> tuple[list[float], list[float]]:
    """Shares of honest and of suspicious models above each limit, from no model to all."""
    first, second = suspicious.dropna().to_numpy(), honest.dropna().to_numpy()
    limits = [np.inf, *sorted({*first, *second}, reverse=True), -np.inf]
    return [(second > limit).mean() for limit in limits], [(first > limit).mean() for limit in limits]


def _corners(curve: tuple[list[float], list[float]]) -> dict[float, tuple[float, float]]:
    """By share of honest models, the smallest and the largest share of suspicious ones: what is seen of a curve."""
    found: dict[float, tuple[float, float]] = {}
    for across, up in zip(*curve, strict=True):
        low, high = found.get(across, (up, up))
        found[across] = min(low, up), max(high, up)
    return {across: ends for across, ends in found.items() if ends[0] != ends[1] or across in (0, 1)}


def _curve_figure(table: pd.DataFrame, path: Path) -> None:
    """What fishing of each strength yields against the detector's score."""
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for index, ((model, start), own) in enumerate(table.groupby(["model", "start"], sort=False)):
        look, name = style(index), f"{model}, {start}"
        axes.plot(own["score_median"], own["psnr_median"], label=name, **look)
        hollow = look | {"ls": ":", "markerfacecolor": "white"}
        axes.plot(own["score_rest_median"], own["psnr_median"], label=f"{name}, the rest", **hollow)
    first = table[(table["model"] == table["model"][0]) & (table["start"] == table["start"][0])]
    for row in first[first["strength"] >= 0.5].itertuples():
        place = {"textcoords": "offset points", "xytext": (5, -9), "fontsize": SMALL - 1}
        axes.annotate(f"{row.strength:g}", (row.score_median, row.psnr_median), **place)
    axes.axvline(1.0, color="#404040", ls=":", label="alarm")
    axes.axhline(RECOGNISABLE, color="#9a9a9a", ls="--", label=f"{RECOGNISABLE:.0f} dB")
    axes.set_xscale("log")
    axes.set_xlabel("median score of the detector", fontsize=NORMAL)
    axes.set_ylabel("PSNR of the fished image, median (dB)", fontsize=NORMAL)
    axes.legend(fontsize=SMALL, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    dress(axes, "both")
    save(figure, path)


DETECT = Rendering(
    "detect",
    detect_files,
    {
        "detect_thresholds": thresholds_block,
        "detect_false_alarms": false_alarms_block,
        "detect_roc": table_block,
        "detect_curve": curve_block,
    },
    detect_figures,
)
RENDERINGS = (DETECT,)
