"""Errors under corruptions: rows, tables and figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.rendering import Rendering, csv, interval, markdown_table, read_rows, read_run
from experiments.scaffold import PAPER
from experiments.trained_models.options import CLEAN
from experiments.trained_models.subjects import over_trainings_in_words
from experiments.trainings.seeds import difference_over_seeds, mean_over_seeds
from experiments.trainings.verdicts import signs_in_words, with_verdicts
from fedmjp.metrics import bootstrap_statistic
from fedmjp.records.rows import Schema
from fedmjp.report.styles import NORMAL, SMALL, dress, save, style

MEASURES = ("error", "difference", "ce", "rise", "rise_difference")
TEN = "table 9"  # the ten corruptions of the paper's Table 9
# What was asked identifies a row; `subset` and `state` name the images and the weights by their content.
CASE = ("dataset", "subset", "images", "model", "state", "package", "size", "seed", "corruption", "severity")
ROWS = Schema(
    (*CASE, "weights", "run_id", "commit", "version", "torch_version", "device", "error", "wrong"), identity=CASE
)


def asked_rows(folder: Path) -> pd.DataFrame:
    """The rows that belong to the folder's last call, as its run.json describes it."""
    rows, asked = read_rows(folder, ROWS), read_run(folder)["asked"]
    states = {state for own in asked["states"].values() for state in own}
    chosen = rows["state"].isin(states) & rows["model"].isin(asked["states"])
    for key, value in asked["case"].items():
        chosen &= rows[key] == value
    chosen &= rows["corruption"].isin([CLEAN, *asked["corruptions"]])
    return rows[chosen & rows["severity"].isin([0, *asked["severities"]])]


def measured_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`tables` of the folder's last call."""
    asked, wrong = read_run(folder)["asked"], answers(asked_rows(folder))
    trainings = {name: [wrong[name, state] for state in states] for name, states in asked["states"].items()}
    return tables(trainings, asked["reference"])


def corruption_files(folder: Path) -> dict[str, str]:
    """table.csv and summary.csv, ours before the paper's."""
    rows = asked_rows(folder)
    weights = {name: ", ".join(own.unique()) for name, own in rows.groupby("model", sort=False)["weights"]}
    origin = {"dataset": rows["dataset"].iloc[0], "count": rows["images"].iloc[0], "seed": rows["seed"].iloc[0]}
    origin["commit"] = "+".join(sorted(rows["commit"].unique()))
    found = {}
    for name, measured in zip(("table.csv", "summary.csv"), measured_tables(folder), strict=True):
        ours = measured.assign(source="measured", weights=measured["model"].map(weights), **origin)
        found[name] = csv(pd.concat([ours, paper_lines(name)], ignore_index=True), 5)
    return found


def corruption_block(folder: Path) -> str:
    """Errors by corruption, a line each, a column a model, with the paired difference from the plain one."""
    table, means = (pd.read_csv(folder / name, keep_default_na=False) for name in ("table.csv", "summary.csv"))
    ours, paper = (table[(table["source"] == "measured") == own] for own in (True, False))
    models, theirs = list(dict.fromkeys(ours["model"])), list(dict.fromkeys(paper["model"]))
    plain, *others = models
    heads = ["error (%)", f"`{plain}`", *(f"`{m}` (difference)" for m in others), *(f"CE of `{m}`" for m in others)]
    own, whole = ours.set_index(["corruption", "model"]), means.set_index(["corruptions", "model"])
    printed = paper.set_index(["corruption", "model"])["error_mean"]
    rows = [("untouched", whole.loc["none"], "mce", ["", ""])]
    for name in dict.fromkeys(ours["corruption"]):
        rows.append((name.replace("_", " "), own.loc[name], "ce", [printed.get((name, m), "") for m in theirs]))
    ten = whole.loc[TEN]
    cells = [f"{float(ten.loc[m, 'error_mean']):.1f}, printed {float(ten.loc[m, 'paper_mce']):.1f}" for m in theirs]
    rows += [("mean of the paper's ten", ten, "mce", cells), ("mean of all", whole.loc["all"], "mce", ["", ""])]
    lines = []
    for name, found, ce, beside in rows:
        words = found["verdict"] if "verdict" in found else pd.Series("", found.index)
        found = found.loc[models].apply(pd.to_numeric, errors="coerce")
        cells = [interval(found.loc[plain], "error", 1)]
        for other in others:
            cell = f"{found.loc[other, 'error_mean']:.1f} ({interval(found.loc[other], 'difference', 1)})"
            cells.append(f"{cell}: {words[other]}" if words[other] else cell)
        cells += [interval(found.loc[m], ce, 1) for m in others]
        lines.append([name, *cells, *map(str, beside)])
    text = markdown_table([*heads, *(f"{model}, paper" for model in theirs)], lines)
    if "seeds" not in ours:
        return text
    both = pd.concat([ours, means[means["source"] == "measured"]]).replace("", np.nan)
    return f"{text}\n\n{over_trainings_in_words(int(ours['seeds'].iloc[0]))} {signs_in_words(both)}".rstrip()


def answers(rows: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """(Model, state) -> frame of 0 and 1 (wrong), a row an image and a column a (corruption, severity).

    The first column is (CLEAN, 0), the others stand in the rows' order.
    """
    return {
        one: pd.DataFrame(
            {(r.corruption, r.severity): np.frombuffer(r.wrong.encode(), np.uint8) - ord("0") for r in own.itertuples()}
        )
        for one, own in rows.groupby(["model", "state"], sort=False)
    }


def paper_corruptions() -> list[str]:
    """The ten corruptions of the paper's Table 9."""
    return list(dict.fromkeys(pd.read_csv(PAPER / "mjp_table9.csv")["corruption"]))


def measures(means: np.ndarray, groups: Sequence[list[int]]) -> np.ndarray:
    """`MEASURES` of each group of corruptions, (..., groups * measures), from mean errors in per cent.

    Args:
        means: (..., 2 * (1 + C)): on untouched images and under C corruptions, the model's and then the reference's.
        groups: places among the C corruptions; an empty group stands for the untouched images.
    """
    mine, theirs = np.split(means, 2, axis=-1)
    found = []
    for group in groups:
        own, other = ((m[..., 1:][..., group] if group else m[..., :1]) for m in (mine, theirs))
        rise, other_rise = own.mean(axis=-1) - mine[..., 0], other.mean(axis=-1) - theirs[..., 0]
        with np.errstate(divide="ignore", invalid="ignore"):  # a reference that errs nowhere leaves CE open
            ce = (100 * own / other).mean(axis=-1)
        found += [own.mean(axis=-1), (own - other).mean(axis=-1), ce, rise, rise - other_rise]
    return np.stack(found, axis=-1)


def tables(wrong: dict[str, list[pd.DataFrame]], reference: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Table 9, a line a model and a corruption, and its means, a line a model and a group of corruptions; in per cent.

    Args:
        wrong: a frame of `answers` a training, with the same columns everywhere, each corruption at the same
            severities; every model has as many trainings as `reference`, in the same order.
        reference: a key of `wrong`. Over several trainings the signs of an MJP model's differences from it are
            compared with the paper's, all of them together.
    """
    names = [c for c in dict.fromkeys(wrong[reference][0].columns.get_level_values(0)) if c != CLEAN]
    errors = {model: [errors_by_corruption(one, names) for one in own] for model, own in wrong.items()}
    ten = [names.index(c) for c in paper_corruptions() if c in names]
    means = {CLEAN: [], TEN: ten, "all": list(range(len(names)))}
    means = {name: group for name, group in means.items() if group or name == CLEAN}
    groups = [[place] for place in range(len(names))] + list(means.values())
    lines, summary = [], []
    for model, own in errors.items():
        found = compare(own, errors[reference], groups, paper_differences([*names, *means], model.endswith("_mjp")))
        for name, values in zip(names, found, strict=False):
            shares = pd.concat([one[name] for one in wrong[model]]).mean()
            severities = {f"error_severity_{severity}": 100 * share for severity, share in shares.items()}
            lines.append({"model": model, "corruption": name} | values | severities)
        for (name, group), values in zip(means.items(), found[len(names) :], strict=True):
            summary.append({"model": model, "corruptions": name, "corruption_count": len(group)} | values)
    both = with_verdicts(pd.concat([pd.DataFrame(lines), pd.DataFrame(summary)], ignore_index=True))
    added = list(both.columns.intersection(["verdict"]))
    table, means = both[: len(lines)][[*lines[0], *added]], both[len(lines) :][[*summary[0], *added]]
    means = means.astype({"corruption_count": int}).reset_index(drop=True)
    return table, means.rename(columns=lambda column: re.sub("^ce", "mce", column))


def errors_by_corruption(wrong: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
    """(images, 1 + corruptions): errors in per cent, on untouched images first, from a frame of `answers`."""
    return 100 * np.stack([wrong[c].to_numpy(float).mean(axis=1) for c in (CLEAN, *names)], axis=1)


def compare(
    own: Sequence[np.ndarray], other: Sequence[np.ndarray], groups: Sequence[list[int]], paper: Sequence[float]
) -> list[dict[str, float]]:
    """`MEASURES` of each group of corruptions with their intervals, columns of a line each.

    Args:
        own, other: `errors_by_corruption` of each training of a model, and of the one it is compared with.
        groups: see `measures`.
        paper: the paper's difference of each group, NaN where it gives none.
    """
    pairs = [np.concatenate(pair, axis=1) for pair in zip(own, other, strict=True)]
    if len(pairs) == 1:
        three = np.stack(bootstrap_statistic(pairs[0], partial(measures, groups=groups)), axis=-1)
        return [_named(values) for values in three.reshape(len(groups), len(MEASURES), 3)]
    each = np.stack([measures(pair.mean(axis=0), groups) for pair in pairs]).reshape(len(pairs), len(groups), -1)
    lines = []
    for values, theirs in zip(each.transpose(1, 2, 0), paper, strict=True):  # (measures, trainings)
        line = {}
        for measure, one in zip(MEASURES, values, strict=True):
            line |= difference_over_seeds(one, theirs) if measure == "difference" else mean_over_seeds(measure, one)
        lines.append(line)
    return lines


def paper_differences(groups: Sequence[str], defended: bool) -> list[float]:
    """Of each corruption or group, the paper's MJP model's error minus its plain one's; NaN where it gives none."""
    ninth = pd.read_csv(PAPER / "mjp_table9.csv").pivot(index="corruption", columns="model", values="error")
    found = (ninth["deit_s_mjp"] - ninth["deit_s"]).to_dict() if defended else {}
    if found:
        found[TEN] = float(np.mean(list(found.values())))
    return [found.get(group, np.nan) for group in groups]


def paper_lines(name: str) -> pd.DataFrame:
    """The paper's Table 9 for table.csv, its Table 4 for summary.csv, there with the mean of Table 9's ten errors."""
    ninth = pd.read_csv(PAPER / "mjp_table9.csv")
    if name == "table.csv":
        return ninth.rename(columns={"error": "error_mean"}).assign(source="paper, Table 9")
    fourth = pd.read_csv(PAPER / "mjp_table4.csv").rename(columns={"mce": "paper_mce"})
    columns = {"source": "paper, Tables 4 and 9", "corruptions": TEN, "corruption_count": ninth["corruption"].nunique()}
    return fourth.assign(**columns, error_mean=fourth["model"].map(ninth.groupby("model")["error"].mean()))


def figure(table: pd.DataFrame, reference: str, path: Path) -> None:
    """Draw errors by corruption, and their differences from the reference's, with the paper's differences."""
    names = list(dict.fromkeys(table["corruption"]))
    drawing = Figure(figsize=(6.8, 0.9 + 0.25 * len(names)), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    models = list(dict.fromkeys(table["model"]))
    for index, model in enumerate(models):
        own = table[table["model"] == model].set_index("corruption").loc[names]
        places = np.arange(len(names)) + 0.3 * (index - (len(models) - 1) / 2) / max(1, len(models) - 1)
        kind = style(index) | {"ls": "", "ms": 3.5, "elinewidth": 0.9, "capsize": 1.5}
        for axes, column in zip(panels, ("error", "difference"), strict=True):
            if column == "error" or model != reference:
                mean = own[f"{column}_mean"]
                spread = np.stack([mean - own[f"{column}_low"], own[f"{column}_high"] - mean]).clip(min=0)
                axes.errorbar(mean, places, xerr=spread, label=model, **kind)
    paper = pd.read_csv(PAPER / "mjp_table9.csv").pivot(index="corruption", columns="model", values="error")
    theirs = (paper["deit_s_mjp"] - paper["deit_s"]).reindex(names)
    panels[1].plot(theirs, np.arange(len(names)), "k|", ms=7, label="paper's Table 9, deit_s_mjp")
    panels[1].axvline(0, color="#9a9a9a", lw=0.8, zorder=0)
    panels[0].set_yticks(np.arange(len(names)), [n.replace("_", " ") for n in names])
    panels[0].invert_yaxis()
    words = ("Top-1 error, mean over severities (%)", f"Difference from {reference} (points)")
    for axes, label in zip(panels, words, strict=True):
        axes.set_xlabel(label, fontsize=NORMAL)
        dress(axes)
        axes.grid(axis="y", color="#eeeeee", lw=0.6)
        axes.set_axisbelow(True)
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawing.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=SMALL, frameon=False
    )
    save(drawing, path)


def _named(values: np.ndarray) -> dict[str, float]:
    """(measures, 3) -> a line's entries."""
    kinds = [f"{measure}{part}" for measure in MEASURES for part in ("_mean", "_low", "_high")]
    return dict(zip(kinds, map(float, values.ravel()), strict=True))


def _figures(folder: Path) -> None:
    figure(measured_tables(folder)[0], read_run(folder)["asked"]["reference"], folder / "corruptions.png")


CORRUPTION = Rendering("corruptions", corruption_files, {"corruptions": corruption_block}, _figures)
