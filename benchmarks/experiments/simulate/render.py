"""What is rendered from the rows of `python -m fedmjp.simulate`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import MEAN, Rendering, interval, markdown_table, read_rows
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


def _figures(folder: Path) -> None:
    leakage_by_round_figure(read_rows(folder), folder / "leakage_by_round.png")


RENDERINGS = (
    Rendering("simulate", run_files, {"simulate": run_block}, _figures),
    Rendering("mjp_federation", run_files, figures=_figures),
    Rendering("soteria_precode_ats", run_files, {"soteria_precode_ats": run_block}),
)
