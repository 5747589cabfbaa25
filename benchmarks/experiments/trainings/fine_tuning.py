"""A trained ViT fine-tuned plainly and under MJP: Tables 1 to 3 of the MJP paper, where positions are in use already.

A ViT that starts from random weights hardly uses positions after a short training (`backbones`, `ablation`), so that a
jigsaw costs it little and MJP has nothing to win. Here every line starts from the same published weights.

Departs from the paper: fine-tuning from weights that were trained without MJP, instead of 300 epochs from random ones;
Tiny-ImageNet instead of ImageNet-1k, a ViT-Ti at 160 pixels instead of a DeiT-S at 224. Signs of differences can be
compared, figures cannot; `seeds` says what the verdicts mean.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from experiments.scaffold import PAPER
from experiments.trainings import ablation
from experiments.trainings.options import FineTuningOptions, Variant
from experiments.trainings.seeds import ratio_curves, save_with_legend
from experiments.trainings.tables import TrainingTable

METRICS = ("accuracy", "diff_norm", "diff_norm_root", "diff_share", "consistency")
PLAIN = ablation.PLAIN


def variants_of(options: FineTuningOptions) -> list[Variant]:
    """The asked lines of Table 2 at their masking ratio, and its last line at those of Table 3.

    Raises:
        UsageError: an unknown line, none, one twice, or none that the others are compared with.
    """
    known = {line.name: line for line in ablation.variants_of(options.model, options.training_gamma)}
    wrong = [name for name in options.lines if name not in known]
    if wrong or len(set(options.lines)) < len(options.lines) or PLAIN not in options.lines:
        raise UsageError(f"--lines takes {PLAIN} and different others of {', '.join(known)}, not {options.lines}")
    ratios = [
        Variant(f"J, γ = {gamma:g}", options.model, "mjp", {"gamma": gamma}, against=PLAIN)
        for gamma in options.more_gammas
    ]
    return [*(known[name] for name in options.lines), *ratios]


def paper(options: FineTuningOptions) -> dict[str, dict[str, float]]:
    """The paper's figures by line: Table 2, with Diff. Norm. of Table 1, and Table 3."""
    found = ablation.paper()[["accuracy", "consistency"]].to_dict("index")
    first = pd.read_csv(PAPER / "mjp_table1.csv").set_index("model")["diff_norm"]
    found[PLAIN]["diff_norm"], found["J"]["diff_norm"] = first["deit_s"], first["deit_s_mjp"]
    third = pd.read_csv(PAPER / "mjp_table3.csv").set_index("training_gamma")
    ratios = {f"J, γ = {g:g}": third.loc[g].to_dict() for g in options.more_gammas if g in third.index}
    return found | ratios


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference, a curve a line that has as many seeds as any."""
    seeds = rows.groupby("line")["seed"].nunique()
    rows = rows[rows["line"].isin(seeds.index[seeds == seeds.max()])]
    drawing = Figure(figsize=(6.8, 3.6), layout="constrained")
    panels = drawing.subplots(1, 2)
    methods, labels = ablation.paper()["method"], {PLAIN: f"{PLAIN}: plain"}
    for name, group in rows[rows["line"] != PLAIN].groupby("line", sort=False):
        letter, gamma = name.partition(",")[0], group["defense_parameters"].iloc[0].get("gamma")
        labels[name] = f"{letter}: {methods[letter]}" + ("" if gamma is None else f", γ = {gamma:g}")
    for panel, metric in zip(panels, ("accuracy", "consistency"), strict=True):
        ratio_curves(panel, rows, metric, labels)
    save_with_legend(drawing, panels[0], path, columns=2)


def table(options: FineTuningOptions) -> TrainingTable:
    """The table."""
    methods = ablation.paper()["method"].to_dict() | {PLAIN: f"plain {options.model} (paper: DeiT-S)"}
    return TrainingTable("fine_tuning", options, variants_of(options), paper(options), METRICS, figure, methods)


def run(options: FineTuningOptions, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table.

    Raises:
        UsageError: no weights to start from.
    """
    if options.weights == "random":
        raise UsageError("fine_tuning needs trained weights; pass --weights timm or a checkpoint's path")
    table(options).run(console)
