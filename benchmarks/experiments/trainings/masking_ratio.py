"""MJP trained with different masking ratios.  Table 3 and Figure 2 (c) of the MJP paper.

    python benchmarks/masking_ratio.py --data-path DIR

Trains a ViT under MJP at each masking ratio, once a seed, and measures top-1 accuracy, Diff. Norm. and Consistency at
gamma 0.5, and accuracy against the masking ratio at inference. A ratio of 0 is the localisation loss alone, without an
unknown embedding (line D of the paper's Table 2, with which its Table 3 agrees). Trainings are kept in --trainings and
shared with benchmarks/backbones.py and benchmarks/ablation.py. Writes table.csv, table.md, figure.png and run.json to
--out.

The text copy of the paper lost some of Table 3's figures; those of ratios 0 and 0.1 are taken from lines D and J of
Table 2 and from Table 1, whose Consistency is the same. Departs from the paper as benchmarks/backbones.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from attacks import UsageError
from experiments.trainings.seeds import markdown, ratio_curves, save_with_legend, seeds_table, write_table
from experiments.trainings.variants import Line, TrainingOptions, limits, train_lines
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.records.run_record import note_run

PAPER = Path(__file__).resolve().parents[2] / "paper"
METRICS = ("accuracy", "diff_norm", "diff_share", "consistency")


@dataclass(frozen=True)
class Options(TrainingOptions):
    """MJP trained with different masking ratios."""

    model: str = "vit_micro_32"
    """Plain ViT."""
    training_gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Masking ratios in training; the others are held against the first."""
    out: Path = Path("runs/masking_ratio")
    """Folder of tables and figure (the committed ones stand in results/masking_ratio)."""


def table_lines(options: Options) -> list[Line]:
    """A line a masking ratio in training.

    Raises:
        UsageError: no ratio, or one twice.
    """
    if not options.training_gammas or len(set(options.training_gammas)) < len(options.training_gammas):
        raise UsageError("--training-gammas takes different numbers, at least one")
    first = f"{options.training_gammas[0]:g}"
    lines = []
    for gamma in options.training_gammas:
        name, without = f"{gamma:g}", {"positions": "own"} if gamma == 0 else {}
        against = "" if name == first else first
        lines.append(Line(name, options.model, "mjp", {"gamma": gamma} | without, against=against))
    return lines


def paper() -> dict[str, dict[str, float]]:
    """Table 3 by masking ratio in training, with what other tables say of the same trainings."""
    own = pd.read_csv(PAPER / "mjp_table3.csv").set_index("training_gamma")
    ablation = pd.read_csv(PAPER / "mjp_table2.csv").set_index("line")["accuracy"]
    first = pd.read_csv(PAPER / "mjp_table1.csv").set_index("model")["diff_norm"]
    own.loc[0.0, "accuracy"], own.loc[0.1, "accuracy"] = ablation["D"], ablation["J"]
    own.loc[0.1, "diff_norm"] = first["deit_s_mjp"]
    return {f"{gamma:g}": row.to_dict() for gamma, row in own.iterrows()}


def figure(rows: pd.DataFrame, lines: Sequence[Line], path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference, a curve a ratio in training."""
    drawing = Figure(figsize=(6.8, 3.3), layout="constrained")
    panels = drawing.subplots(1, 2)
    for panel, metric in zip(panels, ("accuracy", "consistency"), strict=True):
        ratio_curves(panel, rows, metric, {line.name: f"trained with γ = {line.name}" for line in lines})
    save_with_legend(drawing, panels[0], path, columns=3)


def run(options: Options, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table."""
    lines = table_lines(options)
    rows = train_lines(lines, options, console)
    table = seeds_table(rows, {line.name: line.against for line in lines}, paper())
    write_table(options.out, table, f"{markdown(table, METRICS)} {limits(rows)}")
    figure(rows, lines, options.out / "figure.png")
    note_run(options.out, "python benchmarks/masking_ratio.py", rows, data=sorted(set(rows["provenance"])))
    console.print((options.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = split_commas(parse(Options, "python benchmarks/masking_ratio.py", Options.__doc__, arguments))
    return guarded(
        lambda: run(options, terminal()),
        lambda: f"finished trainings are in {options.trainings}; go on with --resume",
    )


if __name__ == "__main__":
    sys.exit(main())
