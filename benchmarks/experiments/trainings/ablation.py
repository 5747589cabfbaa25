"""The variants of MJP one by one.  Table 2 of the MJP paper.

    python benchmarks/ablation.py --data-path DIR

Trains each variant once a seed, measures top-1 accuracy and Consistency (gamma 0.5), and times a training step of each
against line A's. A variant is measured with the positions that it was trained with: at shuffled places E shows the
place's own, F the place's own and the origin, G to J the unknown one. Trainings are kept in --trainings and shared with
benchmarks/backbones.py and benchmarks/masking_ratio.py. Writes table.csv, table.md, latency.csv, figure.png and
run.json to --out.

The timed steps alternate in one process, so that a busy machine hurts all alike; a ratio is the median over rounds of a
step's seconds by those of A's step in the same round. Departs from the paper as benchmarks/backbones.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from attacks import UsageError
from experiments.speed.timing import timed
from experiments.trainings.seeds import difference_points, markdown, save_with_legend, seeds_table, write_table
from experiments.trainings.variants import Line, TrainingOptions, limits, train_lines
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run
from fedmjp.training.trainer import Trainer, load

PAPER = Path(__file__).resolve().parents[2] / "paper" / "mjp_table2.csv"
METRICS = ("accuracy", "consistency")
PLAIN = "A"


@dataclass(frozen=True)
class Options(TrainingOptions):
    """The variants of MJP one by one."""

    model: str = "vit_micro_32"
    """Plain ViT."""
    training_gamma: float = 0.1
    """Masking ratio in training of the lines with a jigsaw (the paper's choice for accuracy)."""
    timing_model: str = ""
    """Model whose steps are timed (none given: --model)."""
    timing_rounds: int = 0
    """Rounds of timed steps, one step a line in each; 0 keeps the latency.csv in --out, if there is one."""
    out: Path = Path("runs/ablation")
    """Folder of tables and figure (the committed ones stand in results/ablation)."""


def table_lines(model: str, gamma: float) -> list[Line]:
    """Lines A to J."""

    def mjp(**options: object) -> dict[str, object]:
        return {"gamma": gamma, "dal": "none"} | options

    kinds: dict[str, tuple[str, str, dict[str, object]]] = {
        PLAIN: (model, "none", {}),
        "B": (f"{model}_nope", "none", {}),
        "C": (model, "spp", {}),
        "D": (model, "mjp", {"gamma": 0.0, "positions": "own"}),
        "E": (model, "mjp", mjp(positions="own")),
        "F": (model, "mjp", mjp(positions="index")),
        "G": (model, "mjp", mjp()),
        "H": (model, "mjp", mjp(dal="pca")),
        "I": (model, "mjp", mjp(dal="linear")),
        "J": (model, "mjp", {"gamma": gamma}),
    }
    return [Line(name, *kind, against="" if name == PLAIN else PLAIN) for name, kind in kinds.items()]


def paper() -> pd.DataFrame:
    """Table 2 by line."""
    return pd.read_csv(PAPER).set_index("line")


def latency(options: Options) -> pd.DataFrame:
    """Seconds of a training step of each line, and its ratio to line A's: median and quartiles over rounds."""
    lines = table_lines(options.timing_model or options.model, options.training_gamma)
    configs = {line.name: options.config(line, options.seeds[0]) for line in lines}
    data = load(configs[PLAIN])
    trainers = {name: Trainer(config, data) for name, config in configs.items()}
    images, labels = next(trainers[PLAIN].batches.epoch(1, trainers[PLAIN].device))
    draws = torch.Generator().manual_seed(options.seeds[0])
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in track(range(options.timing_rounds + 2), description="timed steps", transient=True):
        for name, trainer in trainers.items():
            trainer.model.module.train()
            seconds[name].append(timed(lambda t=trainer: t.step(images, labels, draws, 1), trainer.device))
    found = []
    for name, trainer in trainers.items():
        own = pd.Series(seconds[name][2:])  # the first rounds warm up
        ratios = own / pd.Series(seconds[PLAIN][2:])
        found.append(
            {
                "line": name,
                "model": trainer.model.name,
                "batch_size": len(images),
                "seconds": own.median(),
                "ratio": ratios.median(),
                "ratio_q25": ratios.quantile(0.25),
                "ratio_q75": ratios.quantile(0.75),
                "rounds": options.timing_rounds,
                "precision": options.precision,
                **provenance.columns(trainer.device),
            }
        )
    return pd.DataFrame(found)


def timed_steps(path: Path) -> dict[str, dict[str, str]]:
    """The column of step times for the table, from a latency.csv; none where there is no such file."""
    if not path.exists():
        return {}
    rows = pd.read_csv(path, dtype={"line": str}).set_index("line")
    told = {name: f"{r.ratio:.2f} ({r.ratio_q25:.2f} to {r.ratio_q75:.2f})" for name, r in rows.iterrows()}
    return {"step / A's (quartiles)": told}


def figure(table: pd.DataFrame, path: Path) -> None:
    """Each line's difference to A, ours and the paper's."""
    methods = paper()["method"]
    labels = {name: f"{name}: {methods[name]}" for name in table["line"].unique() if name != PLAIN}
    drawing = Figure(figsize=(6.8, 3.6), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        difference_points(panel, table, metric, labels)
    save_with_legend(drawing, panels[0], path, columns=2)


def run(options: Options, console: Console) -> None:
    """Train what is missing, write tables and figure, and print the table."""
    if options.timing_rounds < 0:
        raise UsageError("--timing-rounds must not be negative")
    lines = table_lines(options.model, options.training_gamma)
    rows = train_lines(lines, options, console)
    table = seeds_table(rows, {line.name: line.against for line in lines}, paper()[list(METRICS)].to_dict("index"))
    if options.timing_rounds:
        options.out.mkdir(parents=True, exist_ok=True)
        latency(options).to_csv(options.out / "latency.csv", index=False, float_format="%.5g")
    notes = paper()["method"].to_dict() | {PLAIN: f"plain {options.model} (paper: DeiT-S)"}
    text = markdown(table, METRICS, notes, timed_steps(options.out / "latency.csv"))
    write_table(options.out, table, f"{text} {limits(rows)}")
    figure(table, options.out / "figure.png")
    note_run(options.out, "python benchmarks/ablation.py", rows, data=sorted(set(rows["provenance"])))
    console.print((options.out / "table.md").read_text(), highlight=False, markup=False, soft_wrap=True)
    console.print(f"tables and figure: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = split_commas(parse(Options, "python benchmarks/ablation.py", Options.__doc__, arguments))
    return guarded(
        lambda: run(options, terminal()),
        lambda: f"finished trainings are in {options.trainings}; go on with --resume",
    )


if __name__ == "__main__":
    sys.exit(main())
