"""What is rendered from the measures of trained models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, interval, markdown_table
from experiments.trained_models.consistency import consistency_figures
from experiments.trained_models.corruption_table import CORRUPTION
from experiments.trained_models.subjects import over_trainings_in_words
from experiments.trainings.seeds import difference_cell
from experiments.trainings.verdicts import signs_in_words

# Distances at masking ratio 0.5: column, its head, digits. Tables from before a measure was taken lack it.
DISTANCES = {
    "diff_norm": ("Diff. Norm.", 2),
    "diff_norm_root": ("not squared", 2),
    "diff_share": ("of another image's", 4),
}


def consistency_block(folder: Path, paper: bool) -> str:
    """Accuracy against the masking ratio, Diff. Norm. and Consistency at 0.5, ours before the paper's.

    Args:
        paper: whether the paper's lines are shown.
    """
    table = pd.read_csv(folder / "table.csv")
    ratios, lines = (0.0, 0.5, 0.9), []
    shown = {name: form for name, form in DISTANCES.items() if f"{name}_mean" in table}
    for (model, way), group in table[table["source"] == "measured"].groupby(["model", "positions"], sort=False):
        own = group.set_index("gamma")
        cells = [interval(own.loc[g], "accuracy", 1) for g in ratios]
        cells += [interval(own.loc[0.5], name, digits) for name, (_, digits) in shown.items()]
        lines.append([f"`{model}`", way, *cells, interval(own.loc[0.5], "consistency", 1)])
    for _, row in table[table["source"] == "paper, Table 1"].iterrows() if paper else ():
        name = f"{row.model.removesuffix('_mjp')}{' + MJP' if row.defense == 'mjp' else ''}, paper's Table 1"
        cells = [f"{row.accuracy_mean:g}", *[""] * (len(ratios) - 1), f"{row.diff_norm_mean:g}"]
        cells += [""] * (len(shown) - 1) + [f"{row.consistency_mean:g}"]
        lines.append([name, "", *cells])
    heads = ["model", "positions", *(f"γ = {g:g}" for g in ratios)]
    return markdown_table([*heads, *(head for head, _ in shown.values()), "Consistency (%)"], lines)


def position_block(folder: Path) -> str:
    """Explained variance and position regression, ours before the paper's; then means over several trainings."""
    several = folder / "over_trainings.csv"
    variance, errors = (pd.read_csv(folder / name) for name in ("explained_variance.csv", "regression.csv"))
    shown, lines = (3, 4, 6, 7), []
    for (model, weights), group in variance[variance["source"] == "measured"].groupby(["model", "weights"], sort=False):
        row = errors[(errors["model"] == model) & (errors["weights"] == weights)].iloc[0]
        cells = [f"{_spread(row, 'mae', k, 2)} ({row[f'guess_{k}']:.1f})" for k in ("1d", "2d")]
        cells += [_spread(row, "ridge", k, 2) for k in ("1d", "2d")]
        name = f"`{model}`, {'random' if 'NOT TRAINED' in weights else 'trained'}"
        if several.exists() and "NOT TRAINED" not in weights:
            name = f"`{model}`, {weights.removesuffix('.safetensors')}"
        lines.append([name, *_shares(group, shown), *cells])
    for model, group in variance[variance["source"] != "measured"].groupby("model", sort=False):
        lines.append([f"{model}, paper's Table 7", *_shares(group, shown), "", "", "", ""])
    for _, row in errors[errors["source"] != "measured"].iterrows():
        cells = [_spread(row, "mae", k, 3) for k in ("1d", "2d")]
        name = row.model if row.dal == "none" or pd.isna(row.dal) else f"{row.model} ({row.dal} DAL)"
        lines.append([f"{name}, paper's Table 8", *[""] * len(shown), *cells, "", ""])
    heads = ["position embeddings", *(f"first {n}" for n in shown), "1-D error (guessing)", "2-D error (guessing)"]
    text = markdown_table([*heads, "1-D, ridge", "2-D, ridge"], lines)
    return f"{text}\n\n{_position_means(pd.read_csv(several), shown)}" if several.exists() else text


def _position_means(table: pd.DataFrame, shown: tuple[int, ...]) -> str:
    """Means over trainings, a line a model, and paired differences with the paper's."""
    digits = {f"first {n}": 2 for n in shown} | {"1-D error": 3, "2-D error": 4}
    lines = []
    for model, group in table.groupby("model", sort=False):
        own = group.set_index("measure")
        lines.append([f"`{model}`", *(interval(own.loc[name], "value", count) for name, count in digits.items())])
        if own["difference_mean"].notna().all():
            cells = [difference_cell(own.loc[name], count) for name, count in digits.items()]
            lines.append([f"… minus `{table.model[0]}`", *cells])
    words = f"{over_trainings_in_words(table['seeds'].max())} {signs_in_words(table)}".rstrip()
    heads = ["mean", *(f"{name} (%)" if name.startswith("first") else name for name in digits)]
    return f"{markdown_table(heads, lines)}\n\n{words}"


def _spread(row: pd.Series, kind: str, space: str, digits: int) -> str:
    return f"{row[f'{kind}_{space}_mean']:.{digits}f} ± {row[f'{kind}_{space}_spread']:.{digits}f}"


def _shares(group: pd.DataFrame, shown: tuple[int, ...]) -> list[str]:
    own = group.set_index("dimension")["explained_variance"]
    return [f"{own[n]:.1f} %" for n in shown]


def attention_block(folder: Path) -> str:
    """Measures of the last block's attention, a line a model, differences from the first one below the others."""
    table = pd.read_csv(folder / "table.csv")
    digits, lines = {"entropy": 3, "distance": 3, "head_diversity": 3, "content": 2}, []
    for place, row in table.iterrows():
        random = "NOT TRAINED" in row.weights
        cells = [interval(row, name, count) for name, count in digits.items()]
        lines.append([f"`{row.model}`, {'random' if random else 'trained'}", str(row.patches), *cells])
        if place and not random and not pd.isna(row.entropy_difference_mean):
            cells = [interval(row, f"{name}_difference", count) for name, count in digits.items()]
            lines.append([f"… minus `{table.model[0]}`", "", *cells])
    heads = ["entropy / uniform", "distance / image side", "head diversity", "content (bits)"]
    text = markdown_table(["model", "patches", *heads], lines)
    return f"{text}\n\n{over_trainings_in_words(table['seeds'].max())}" if "seeds" in table else text


def on_fine_tuned(measured: Rendering, folder: str) -> Rendering:
    """The same measures, of arms that `fine_tuning` has trained, from the results folder of this ending."""
    blocks = {f"{name}_{folder}": block for name, block in measured.blocks.items()}
    return replace(measured, folder=f"{measured.folder}_{folder}", blocks=blocks)


POSITIONS = Rendering("position_embeddings", blocks={"position_embeddings": position_block})
ATTENTION = Rendering("attention_maps", blocks={"attention": attention_block})
RENDERINGS = (
    Rendering(
        "consistency", blocks={"consistency": partial(consistency_block, paper=True)}, figures=consistency_figures
    ),
    Rendering(
        "consistency_cifar10",
        blocks={"consistency_cifar10": partial(consistency_block, paper=False)},
        figures=consistency_figures,
    ),
    *(POSITIONS, CORRUPTION, ATTENTION),
    *(on_fine_tuned(one, folder) for folder in ("fine_tuned", "seeds") for one in (POSITIONS, CORRUPTION, ATTENTION)),
)
