"""How much a jigsaw changes a model's answer: Tables 1 and 3, Figure 2 of the MJP paper.

What is measured, and how: `fedmjp.evaluation.consistency`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Console

from experiments.rendering import csv
from experiments.scaffold import PAPER
from experiments.session import prepare_torch
from experiments.trained_models.checkpoints import load_bundle, load_trained
from experiments.trained_models.options import ConsistencyOptions
from fedmjp.evaluation.consistency import SCORES, measure, summarise
from fedmjp.records import provenance
from fedmjp.records.run_record import note_run
from fedmjp.report.columns import TEXT
from fedmjp.report.styles import NORMAL, SMALL, dress, error_bars, save, style

SHOWN = ("model", "positions", "gamma", *(f"{score}_mean" for score in SCORES), "count")


def kept(options: ConsistencyOptions) -> list[pd.DataFrame]:
    """Measured lines of the table in --out for other models than those asked for."""
    path = options.out / "table.csv"
    if not path.exists():
        return []
    before = pd.read_csv(path, dtype=TEXT)
    return [before[(before["source"] == "measured") & ~before["model"].isin(options.subjects())]]


def table(options: ConsistencyOptions, device: torch.device) -> pd.DataFrame:
    """Our lines, then the paper's of Tables 1 and 3, which stand at gamma 0.5.

    Raises:
        UsageError: data or weights that are not there, or weights for other classes.
    """
    parts = []
    for name, subject in options.subjects().items():
        bundle = load_bundle(options, subject)
        model = load_trained(options, subject.name, subject.sources[0], bundle)
        own = summarise(measure(model, bundle.test, options.gammas, seed=options.seed, device=device))
        parts.append(own.assign(source="measured", model=name, weights=model.provenance, dataset=bundle.provenance))
    ours = pd.concat(parts, ignore_index=True).assign(commit=provenance.commit(), seed=options.seed)
    frame = pd.concat([ours, paper_lines()], ignore_index=True)
    named = frame.rename(columns={score: f"{score}_mean" for score in SCORES} | {"images": "count"})
    return pd.concat([*kept(options), named], ignore_index=True)


def paper_lines() -> pd.DataFrame:
    """The paper's figures; of Table 3 those that its text copy kept."""
    first = pd.read_csv(PAPER / "mjp_table1.csv").assign(source="paper, Table 1")
    third = pd.read_csv(PAPER / "mjp_table3.csv").assign(source="paper, Table 3", model="deit_s_mjp")
    return pd.concat([first, third], ignore_index=True).assign(gamma=0.5)


def figure(frame: pd.DataFrame, path: Path) -> None:
    """Draw Figure 2's accuracy, and Consistency, against the masking ratio at inference."""
    drawing = Figure(figsize=(6.8, 3.1), layout="constrained")
    panels = drawing.subplots(1, 2)
    for index, ((model, way), group) in enumerate(frame.groupby(["model", "positions"], sort=False)):
        label = f"{model}, {'unknown' if way == 'unknown' else 'own'} positions"
        for axes, name in zip(panels, ("accuracy", "consistency"), strict=True):
            look = style(index) | {"ms": 4, "lw": 1.2, "elinewidth": None}
            error_bars(axes, group["gamma"], group, name, label=label, **look)
    for axes, words in zip(panels, ("Accuracy on jigsawed images (%)", "Consistency (%)"), strict=True):
        axes.set_xlabel("Masking ratio at inference", fontsize=NORMAL)
        axes.set_ylabel(words, fontsize=NORMAL)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        dress(axes)
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    save(drawing, path)


def run(options: ConsistencyOptions, console: Console) -> None:
    """Write table and figure and print the table."""
    device = prepare_torch(options)
    frame = table(options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.csv").write_text(csv(frame, 5), encoding="utf-8")
    ours = frame[frame["source"] == "measured"]
    devices = [provenance.device_name(device)]
    note_run(options.out, "python benchmarks/consistency.py", commits=ours["commit"], devices=devices)
    consistency_figures(options.out)
    console.print(ours[list(SHOWN)].to_string(index=False, float_format="%.3f"), highlight=False)
    console.print(f"table and figure: {options.out}", soft_wrap=True, highlight=False)


def consistency_figures(folder: Path) -> None:
    """Draw consistency.png from table.csv."""
    frame = pd.read_csv(folder / "table.csv")
    figure(frame[frame["source"] == "measured"], folder / "consistency.png")
