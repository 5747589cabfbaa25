"""The variants of MJP one by one: Table 2 of the MJP paper, and the cost of a training step of each.

The timed steps alternate in one process, so that a busy machine affects all alike; a ratio is the median over rounds of
a step's seconds by those of line A's step in the same round. Departs from the paper as `backbones` does.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from attacks import UsageError
from experiments.scaffold import PAPER
from experiments.speed.timing import timed
from experiments.trainings.options import AblationOptions, Variant
from experiments.trainings.seeds import difference_points, save_with_legend
from experiments.trainings.tables import TrainingTable
from fedmjp.records import provenance
from fedmjp.training.trainer import Trainer, load

METRICS = ("accuracy", "consistency")
PLAIN = "A"


def variants_of(model: str, gamma: float) -> list[Variant]:
    """Lines A to J of the paper's table."""

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
    return [Variant(name, *kind, against="" if name == PLAIN else PLAIN) for name, kind in kinds.items()]


def paper() -> pd.DataFrame:
    """Table 2 by line."""
    return pd.read_csv(PAPER / "mjp_table2.csv").set_index("line")


def latency(options: AblationOptions) -> pd.DataFrame:
    """Seconds of a training step of each variant, and its ratio to line A's: median and quartiles over rounds."""
    variants = variants_of(options.timing_model or options.model, options.training_gamma)
    configs = {variant.name: options.config(variant, options.seeds[0]) for variant in variants}
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


def timed_steps(folder: Path) -> dict[str, dict[str, str]]:
    """The column of step times for the table, from latency.csv; none where there is no such file."""
    path = folder / "latency.csv"
    if not path.exists():
        return {}
    rows = pd.read_csv(path, dtype={"line": str}).set_index("line")
    cells = {name: f"{r.ratio:.2f} ({r.ratio_q25:.2f} to {r.ratio_q75:.2f})" for name, r in rows.iterrows()}
    return {"step / A's (quartiles)": cells}


def figure(rows: pd.DataFrame, table: pd.DataFrame, path: Path) -> None:
    """Each variant's difference to A, ours and the paper's."""
    methods = paper()["method"]
    labels = {name: f"{name}: {methods[name]}" for name in table["line"].unique() if name != PLAIN}
    drawing = Figure(figsize=(6.8, 3.6), layout="constrained")
    panels = drawing.subplots(1, 2, sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        difference_points(panel, table, metric, labels)
    save_with_legend(drawing, panels[0], path, columns=2)


def table(options: AblationOptions) -> TrainingTable:
    """The table."""
    variants = variants_of(options.model, options.training_gamma)
    notes = paper()["method"].to_dict() | {PLAIN: f"plain {options.model} (paper: DeiT-S)"}
    figures = paper()[list(METRICS)].to_dict("index")
    return TrainingTable("ablation", options, variants, figures, METRICS, figure, notes, timed_steps)


def run(options: AblationOptions, console: Console) -> None:
    """Train what is missing, time steps, write tables and figure, and print the table."""
    if options.timing_rounds < 0:
        raise UsageError("--timing-rounds must not be negative")
    wanted = table(options)
    options.check(wanted.variants)
    if options.timing_rounds:
        options.out.mkdir(parents=True, exist_ok=True)
        latency(options).to_csv(options.out / "latency.csv", index=False, float_format="%.5g")
    wanted.run(console)
