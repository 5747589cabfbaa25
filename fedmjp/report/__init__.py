"""What is rendered from a run's own rows: summary tables, figures, warnings and one self-contained page."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from attacks.registry import UsageError
from fedmjp.records.files import write_whole
from fedmjp.records.rows import load_rows
from fedmjp.report.figures import leakage_by_round_figure, training_figure
from fedmjp.report.page import write_page
from fedmjp.report.panels import read_panels
from fedmjp.report.pictures import MAX_PANELS, Panel, Reconstructed, reconstructions_figure
from fedmjp.report.remarks import as_headlines, as_terminal_lines, notes, noticed, verdicts
from fedmjp.report.tables import as_csv, as_latex, as_text, summarise

__all__ = [
    "MAX_PANELS",
    "Panel",
    "Reconstructed",
    "as_headlines",
    "as_latex",
    "as_terminal_lines",
    "as_text",
    "leakage_by_round_figure",
    "read_panels",
    "reconstructions_figure",
    "render",
    "summarise",
    "summary_files",
    "training_figure",
    "verdicts",
    "write_page",
]

ROUND_COLUMNS = ["defense", "round", "loss", "accuracy", "seconds"]


def render(out: str | os.PathLike[str], panels: list[Panel]) -> Path:
    """Make every report file of a run from what the run left in its output folder.

    Reads rows.jsonl, rounds.csv (may be absent) and run.json (whose `notes` are shown on the page); writes
    summary.csv, summary.tex, leakage_by_round, training and reconstructions as .png and .pdf (each where there is
    something to draw) and report.html.

    Args:
        out: the run's output folder.
        panels: at most 12 rows for the reconstructions figure; none leaves that figure out.

    Returns:
        the path of report.html.

    Raises:
        UsageError: rows.jsonl or run.json is missing or damaged.
    """
    out = Path(out)
    rows, run, rounds = load_rows(out / "rows.jsonl"), _load_run(out / "run.json"), _load_rounds(out / "rounds.csv")
    summary = summarise(rows)
    for name, text in summary_files(rows).items():
        write_whole(out / name, text.encode("utf-8", "backslashreplace"))
    figures: dict[str, Path] = {}
    for name, draw, content in (
        ("reconstructions", reconstructions_figure, panels),
        ("leakage_by_round", leakage_by_round_figure, rows if rows["psnr"].notna().any() else ()),
        ("training", partial(training_figure, test_images=(run.get("data") or {}).get("test_images")), rounds),
    ):
        if len(content):
            figures[name] = out / f"{name}.png"
            draw(content, figures[name])
    page = out / "report.html"
    write_page(
        page,
        run=run,
        summary=summary,
        rounds=rounds,
        rows=rows,
        figures=figures,
        notes=[*run.get("notes", []), *noticed(run), *notes(rows)],
    )
    return page


def summary_files(rows: pd.DataFrame) -> dict[str, str]:
    """Content of summary.csv and summary.tex for a run's rows."""
    return {"summary.csv": as_csv(rows), "summary.tex": as_latex(summarise(rows))}


def _load_run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no {path}; run a benchmark first or name its output folder") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(run, dict):
        raise UsageError(f"{path} holds no object")
    return run


def _load_rounds(path: Path) -> pd.DataFrame:
    if not path.is_file() or not path.stat().st_size:
        return pd.DataFrame(columns=ROUND_COLUMNS)
    rounds = pd.read_csv(path, converters={"defense": str})  # a converter, or a defence named "None" reads as NaN
    missing = [column for column in ROUND_COLUMNS if column not in rounds]
    if missing:
        raise UsageError(f"{path} lacks the columns {missing}")
    return rounds
