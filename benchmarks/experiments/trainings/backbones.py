"""Three families of backbones with and without MJP.  Table 1 and Figure 2 (a), (b) of the MJP paper.

    python benchmarks/backbones.py --data-path DIR

Trains each model plainly and under MJP, once a seed, by the code behind `python -m fedmjp.train`, and measures top-1
accuracy, Diff. Norm. and Consistency (gamma 0.5) as benchmarks/consistency.py does. Swin and ResNet have no position
embedding of patches, so that MJP is the jigsaw alone there. Trainings are kept in --trainings and shared with
benchmarks/ablation.py and benchmarks/masking_ratio.py. Writes table.csv, table.md, figure.png and run.json to --out.

Departs from the paper: small models on a part of CIFAR-10, seen once, instead of 300 epochs of ImageNet-1k. Signs of
differences can be compared, figures cannot; see fedmjp/report/seeds.py for what the verdicts mean.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.trainings.seeds import markdown, ratio_curves, save_with_legend, seeds_table, write_table
from experiments.trainings.variants import Line, TrainingOptions, limits, train_lines
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.records.run_record import note_run

PAPER = Path(__file__).resolve().parents[2] / "paper" / "mjp_table1.csv"
# Which of the paper's models a name is compared with, by its first word.
FAMILIES = {"vit": "deit_s", "deit": "deit_s", "swin": "swin_t", "resnet": "resnet50", "resnet50": "resnet50"}
METRICS = ("accuracy", "diff_norm", "diff_share", "consistency")


@dataclass(frozen=True)
class Options(TrainingOptions):
    """Backbones with and without MJP."""

    models: tuple[str, ...] = ("resnet_micro_32", "vit_micro_32", "swin_micro_32")
    """Models, each trained plainly and under MJP."""
    training_gamma: float = 0.1
    """MJP's masking ratio in training (the paper's choice for accuracy)."""
    out: Path = Path("runs/backbones")
    """Folder of tables and figure (the committed ones stand in results/backbones)."""


def table_lines(options: Options) -> list[Line]:
    """Two lines a model."""
    found = []
    for model in options.models:
        found.append(Line(model, model))
        found.append(Line(f"{model} + MJP", model, "mjp", {"gamma": options.training_gamma}, against=model))
    return found


def paper(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Table 1 by line."""
    table = pd.read_csv(PAPER, keep_default_na=False)
    table["family"] = table["model"].str.removesuffix("_mjp")
    own = table.set_index(["family", "defense"])[["accuracy", "diff_norm", "consistency"]]
    kinds = {line.name: (FAMILIES.get(line.model.split("_")[0]), line.defense) for line in lines}
    return {name: own.loc[kind].to_dict() for name, kind in kinds.items() if kind in own.index}


def figure(rows: pd.DataFrame, lines: Sequence[Line], path: Path) -> None:
    """Accuracy and Consistency against the masking ratio at inference."""
    drawing = Figure(figsize=(6.8, 3.3), layout="constrained")
    panels = drawing.subplots(1, 2)
    for panel, metric in zip(panels, ("accuracy", "consistency"), strict=True):
        ratio_curves(panel, rows, metric, {line.name: line.name for line in lines})
    save_with_legend(drawing, panels[0], path, columns=3)


def run(options: Options, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table."""
    lines = table_lines(options)
    rows = train_lines(lines, options, console)
    table = seeds_table(rows, {line.name: line.against for line in lines}, paper(lines))
    write_table(options.out, table, f"{markdown(table, METRICS)} {limits(rows)}")
    figure(rows, lines, options.out / "figure.png")
    note_run(options.out, "python benchmarks/backbones.py", rows, data=sorted(set(rows["provenance"])))
    console.print((options.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = split_commas(parse(Options, "python benchmarks/backbones.py", Options.__doc__, arguments))
    return guarded(
        lambda: run(options, terminal()),
        lambda: f"finished trainings are in {options.trainings}; go on with --resume",
    )


if __name__ == "__main__":
    sys.exit(main())
