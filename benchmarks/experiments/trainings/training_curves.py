"""Training with and without MJP side by side (Figure 6 of the MJP paper).

    python benchmarks/training_curves.py runs/plain runs/mjp runs/nope

Takes folders of `python -m fedmjp.train` and writes table.csv (a line a training), history.csv (a line an epoch)
and curves_DATA.png to --out. What a step costs under MJP is measured by benchmarks/mjp_overhead.py, in one process:
two trainings at two times cannot tell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from rich.console import Console

from attacks import UsageError
from fedmjp.cli import guarded, parse, terminal
from fedmjp.training.folder import history_figure


@dataclass(frozen=True)
class Options:
    """Curves and final accuracies of trainings."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished trainings."""
    out: Path = Path("runs/training_curves")
    """Folder of tables and figure (the committed ones stand in results/training)."""


def load(folder: Path) -> tuple[dict[str, object], pd.DataFrame]:
    """One training's line for the table, and its history.

    Raises:
        UsageError: no finished training in the folder.
    """
    try:
        described = json.loads((folder / "run.json").read_text())
        history = pd.read_csv(folder / "history.csv")
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no training ({type(error).__name__}); run python -m fedmjp.train") from error
    config, recipe = described["config"], described["config"]["recipe"]
    if len(history) < recipe["epochs"]:
        raise UsageError(f"{folder} ends after epoch {len(history)} of {recipe['epochs']}; finish it with --resume")
    defense = config["defense"]
    gamma = config["options"]["mjp"]["gamma"] if defense == "mjp" else None
    line = {
        "model": config["model"]["model"] + ("_mjp" if defense == "mjp" else ""),
        "data": config["data"]["data"],
        "start": config["model"]["weights"],
        "defense": defense,
        "gamma": gamma,
        "epochs": len(history),
        "images_seen": int(history["steps"].sum() * recipe["batch_size"]),
        "accuracy": 100 * history["test_accuracy"].iloc[-1],
        "test_loss": history["test_loss"].iloc[-1],
        "train_loss": history["train_loss"].iloc[-1],
        "precision": config["precision"],
        "seed": config["seed"],
        "commit": described["commit"],
        "device": described["device"],
    }
    return line, history


def run(options: Options, console: Console) -> None:
    """Write tables and figure, and print the table."""
    if not options.folders:
        raise UsageError("name at least one folder of a finished training")
    loaded = [load(folder) for folder in options.folders]
    table = pd.DataFrame([line for line, _ in loaded])
    if table["model"].duplicated().any():
        raise UsageError(f"two trainings of one model: {', '.join(table['model'])}")
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "table.csv", index=False, float_format="%.5g")
    histories = {line["model"]: history for line, history in loaded}
    long = pd.concat([h.assign(model=name) for name, h in histories.items()], ignore_index=True)
    long[["model", *long.columns.drop("model")]].to_csv(options.out / "history.csv", index=False, float_format="%.6g")
    for data, group in table.groupby("data", sort=False):
        history_figure({n: histories[n] for n in group["model"]}, options.out / f"curves_{data}.png")
    shown = table[["model", "data", "defense", "gamma", "epochs", "images_seen", "accuracy", "test_loss"]]
    console.print(shown.to_string(index=False, na_rep="", float_format="%.2f"), highlight=False)
    console.print(f"tables and figures: {options.out}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse(Options, "python benchmarks/training_curves.py", Options.__doc__, arguments)
    return guarded(lambda: run(options, terminal()), lambda: "nothing was kept; run it again")


if __name__ == "__main__":
    sys.exit(main())
