"""What is rendered from the rows of `python -m fedmjp.simulate`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, answered, csv, interval, markdown_table, read_rows, spread_table
from fedmjp.records.rows import BASELINES
from fedmjp.report import leakage_by_round_figure, summary_files
from fedmjp.report.words import defence_words


def run_files(folder: Path) -> dict[str, str]:
    """summary.csv and summary.tex."""
    return summary_files(read_rows(folder))


def run_block(folder: Path) -> str:
    """Leakage by defence and attack."""
    lines = []
    for _, row in pd.read_csv(folder / "summary.csv").iterrows():
        cells = [
            defence_words(row.defense),
            f"`{row.attack}`",
            str(row["count"]),
            interval(row, "psnr", 1, MEAN),
            f"{row.ssim_mean:.2f}",
        ]
        lines.append([*cells, f"{row.lpips_mean:.2f}", f"{row.patch_recovery_mean:.0%}"])
    return markdown_table(["defence", "attack", "updates", "PSNR (dB)", "SSIM", "LPIPS", "patches > 25 dB"], lines)


def rounds_files(folder: Path) -> dict[str, str]:
    """Beside those of a run table.csv: leakage by defence, round and attack."""
    table = spread_table(read_rows(folder), ["defense", "round", "attack"])
    return run_files(folder) | {"table.csv": csv(table, 4)}


def rounds_block(folder: Path) -> str:
    """Leakage by defence, round and attack: median, images above 25 dB; of the guesses the first alone, once."""
    table = pd.read_csv(folder / "table.csv")
    guess = table[table["attack"] == BASELINES[0]].drop_duplicates(["attack"])
    lines = []
    for _, row in pd.concat([guess, table[~table["attack"].isin(BASELINES)]]).iterrows():
        some = row.failed < row["count"]
        above = f"{round(row.psnr_share_recognisable * row['count'])} of {row['count']}" if some else "no answer"
        median = f"{row.psnr_median:.1f}{answered(row)}" if some else ""
        named = "(none)" if row.attack in BASELINES else defence_words(row.defense)
        number = "" if row.attack in BASELINES else str(row["round"])
        lines.append([named, number, f"`{row.attack}`", median, above])
    return markdown_table(["defence", "round", "attack", "median (dB)", "images above 25 dB"], lines)


def _figures(folder: Path) -> None:
    leakage_by_round_figure(read_rows(folder), folder / "leakage_by_round.png")


SUMS = tuple(f"secure_aggregation_{clients}" for clients in (4, 8, 16, 32))
RENDERINGS = (
    Rendering("simulate", run_files, {"simulate": run_block}, _figures),
    Rendering("mjp_federation", run_files, figures=_figures),
    Rendering("soteria_precode_ats", run_files, {"soteria_precode_ats": run_block}),
    Rendering("known_draws", run_files, {"known_draws": run_block}),
    Rendering("training_mode", run_files, {"training_mode": run_block}),
    Rendering("ats", rounds_files, {"ats": rounds_block}),
    Rendering("adapters", rounds_files, {"adapters": rounds_block}),
    Rendering("lora", rounds_files, {"lora": rounds_block}),
    Rendering("secure_aggregation", rounds_files, {"secure_aggregation": rounds_block}),
    *(Rendering(name, rounds_files, {name: rounds_block}) for name in SUMS),
)
