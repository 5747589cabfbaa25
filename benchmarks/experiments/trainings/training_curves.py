"""Trainings of `python -m fedmjp.train` side by side (Figure 6 of the MJP paper)."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from rich.console import Console

from attacks import UsageError
from experiments.trainings.options import CurveOptions
from fedmjp.records.run_record import note_run
from fedmjp.training.folder import history_figure


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
        "dataset": config["data"]["data"],
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


def curves(folder: Path) -> None:
    """Draw curves_DATA.png of a folder's trainings, from table.csv and history.csv."""
    table, history = (pd.read_csv(folder / name) for name in ("table.csv", "history.csv"))
    for data, group in table.groupby("dataset", sort=False):
        own = {name: history[history["model"] == name] for name in group["model"]}
        history_figure(own, folder / f"curves_{data}.png")


def run(options: CurveOptions, console: Console) -> None:
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
    curves(options.out)
    note_run(options.out, "python benchmarks/training_curves.py", commits=table["commit"], devices=table["device"])
    shown = table[["model", "dataset", "defense", "gamma", "epochs", "images_seen", "accuracy", "test_loss"]]
    console.print(shown.to_string(index=False, na_rep="", float_format="%.2f"), highlight=False)
    console.print(f"tables and figures: {options.out}", soft_wrap=True, highlight=False)
