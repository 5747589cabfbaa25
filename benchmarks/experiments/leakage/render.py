"""What is rendered from the rows of the leakage table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.leakage.condition import condition_figure
from experiments.leakage.position_claim import claim_files
from experiments.leakage.table import labelled, leakage_latex, leakage_markdown, leakage_table
from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows
from experiments.scaffold import PAPER

ACCURACY = ["model", "weights", "block", "setting", "accuracy"]


def known_accuracies(folder: Path) -> dict[tuple[str, str, str, str], float]:
    """Top-1 accuracy in per cent by (model, weights, block, setting), from accuracy.csv."""
    file = folder / "accuracy.csv"
    known = pd.read_csv(file)[ACCURACY] if file.exists() else pd.DataFrame(columns=ACCURACY)
    return {tuple(line[:4]): line[4] for line in known.itertuples(index=False)}


def rendered_table(folder: Path) -> pd.DataFrame:
    """The leakage table (`leakage_table`) of the folder's rows and accuracies."""
    return leakage_table(read_rows(folder), known_accuracies(folder), pd.read_csv(PAPER / "mjp_table5.csv"))


def leakage_files(folder: Path) -> dict[str, str]:
    """table.csv, and for each block its LaTeX and Markdown table."""
    table = rendered_table(folder)
    found = {"table.csv": csv(table, 6)}
    for block in (b for b in table["block"].unique() if b):
        found |= {f"table_{block}.tex": leakage_latex(table, block)}
        found |= {f"table_{block}.md": leakage_markdown(table, block) + "\n"}
    return found


def leakage_figures(folder: Path) -> None:
    """condition.png, where a solved system's condition number is known."""
    rows = read_rows(folder)
    points = labelled(rows[rows["setting"] == "a"])
    if (points["diagnosis"].eq("") & points["condition"].notna()).any():
        condition_figure(points, folder / "condition.png")


def leakage_block(folder: Path) -> str:
    """PSNR on both blocks, a line a model and a column a setting, the paper's figures in parentheses."""
    table = pd.read_csv(folder / "table.csv")
    table["block"] = table["block"].fillna("any")
    lines = []
    for (block, attack, line), group in table.groupby(["block", "attack", "line"], sort=False):
        own = group.set_index("setting")
        cells = [_psnr(own.loc[s]) if s in own.index else "" for s in "abcd"]
        accuracy = ", ".join(f"{own['accuracy'].get(s):.1f} %" for s in "ab" if own["accuracy"].get(s, np.nan) > 0)
        lines.append([block, f"`{attack}`", line, *cells, accuracy])
    heads = ["block", "attack", "model", "(a)", "(b)", "(c)", "(d)", "accuracy (a), (b)"]
    return markdown_table(heads, lines)


def _psnr(row: pd.Series) -> str:
    if pd.isna(row.psnr_mean):
        return "no image"
    return interval(row, "psnr", 1, MEAN) + ("" if pd.isna(row.paper_psnr) else f" ({row.paper_psnr:.1f})")


LEAKAGE = Rendering("april_attack", leakage_files, {"april_attack": leakage_block}, leakage_figures)
CLAIM = Rendering(
    "april_attack",
    lambda folder: claim_files(read_rows(folder), "deit_s"),
    {"position_claim": lambda folder: (folder / "position_claim.md").read_text(encoding="utf-8").strip()},
)
RENDERINGS = (LEAKAGE, CLAIM)
