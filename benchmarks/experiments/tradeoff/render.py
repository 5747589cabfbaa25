"""What is rendered from the rows of the federations."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from attacks.observation import SUPERVISED
from experiments.rendering import Rendering, csv, read_rows, read_run
from experiments.tradeoff.figure import tradeoff_figure
from experiments.tradeoff.table import (
    NOTES,
    OBJECTIVE_NOTES,
    RANKED_NOTES,
    TRAINED_NOTES,
    markdown,
    placed,
    ranked,
    tradeoff_table,
)

RANKS = "ranks.csv"


def _tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(table, rows, accuracy by round)."""
    run, rows, rounds = read_run(folder), read_rows(folder), pd.read_csv(folder / "rounds.csv")
    rows = placed(rows, run.get("recipes", {}))
    ranks = pd.read_csv(folder / RANKS) if (folder / RANKS).exists() else None
    return tradeoff_table(rows, rounds, run.get("not_run", {}), ranks), rows, rounds


def _by_objective(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The same, where points are objectives without a defence."""
    table, rows, rounds = (frame.replace({"point": {"none": SUPERVISED}}) for frame in _tables(folder))
    return table, rows, rounds


def tradeoff_files(folder: Path) -> dict[str, str]:
    """table.csv, and table.md with what the table can tell under it."""
    table, rows, _ = _tables(folder)
    return _files(table, "defence", NOTES if rows["weights"].str.startswith("random").any() else TRAINED_NOTES)


def objectives_files(folder: Path) -> dict[str, str]:
    """The same of federations under several objectives."""
    table, _, _ = _by_objective(folder)
    return _files(table, "objective", OBJECTIVE_NOTES)


def _files(table: pd.DataFrame, kind: str, notes: str) -> dict[str, str]:
    """The files of a table, with these notes under it and those of the originals' ranks."""
    parts = [markdown(table, kind), notes, *([RANKED_NOTES] if ranked(table) else [])]
    return {"table.csv": csv(table, 6), "table.md": "\n\n".join(parts)}


def tradeoff_block(folder: Path) -> str:
    """The first table of table.md: the strongest attack on each federation."""
    return (folder / "table.md").read_text(encoding="utf-8").split("\n\n")[0]


def _figures(folder: Path) -> None:
    tradeoff_figure(*_tables(folder), folder / "tradeoff.png")


def _objective_figures(folder: Path) -> None:
    tradeoff_figure(*_by_objective(folder), folder / "tradeoff.png", "Linear probe's accuracy")


TRADEOFF = Rendering("federated_tradeoff", tradeoff_files, {"tradeoff": tradeoff_block}, _figures)
OBJECTIVES = Rendering(
    "federated_tradeoff_objectives", objectives_files, {"tradeoff_objectives": tradeoff_block}, _objective_figures
)
TRAINED = Rendering("federated_tradeoff_trained", tradeoff_files, {"tradeoff_trained": tradeoff_block}, _figures)
VIT_TI = Rendering("federated_tradeoff_vit_ti", tradeoff_files, {"tradeoff_vit_ti": tradeoff_block}, _figures)
NEW_HEAD = Rendering("federated_tradeoff_new_head", tradeoff_files, {"tradeoff_new_head": tradeoff_block}, _figures)
RENDERINGS = (TRADEOFF, TRAINED, NEW_HEAD, VIT_TI, OBJECTIVES)
