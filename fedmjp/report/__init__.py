"""What is rendered from a run's own rows: summary tables, figures, warnings and one self-contained page."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from attacks.registry import UsageError
from fedmjp.records.failures import load_failures
from fedmjp.records.files import write_whole
from fedmjp.records.rows import ROW_KEYS, load_rows
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
    "read_rows",
    "reconstructions_figure",
    "render",
    "summarise",
    "summary_files",
    "training_figure",
    "verdicts",
    "write_page",
]

# What the report is made from: the keys of a row without those that it does not show.
REPORTED = tuple(
    name
    for name in ROW_KEYS
    if name not in {"commit", "version", "torch_version", "device", "gradient_norm", "details"}
)
ROUND_COLUMNS = ["defense", "round", "loss", "accuracy", "seconds"]


def read_rows(out: str | os.PathLike[str]) -> pd.DataFrame:
    """The rows of a run's folder as the report takes them: a million in about 200 MB, without what it does not show.

    Raises:
        UsageError: rows.jsonl is missing or damaged.
    """
    return load_rows(Path(out) / "rows.jsonl", columns=REPORTED, categories=True)


def render(out: str | os.PathLike[str], panels: list[Panel], rows: pd.DataFrame | None = None) -> Path:
    """Make every report file of a run from what the run left in its output folder.

    Reads rows.jsonl, rounds.csv and failures.jsonl (may be absent) and run.json (whose `notes` are shown on the page);
    writes summary.csv, summary.tex, leakage_by_round, training and reconstructions as .png and .pdf (each where there
    is something to draw) and report.html.

    Args:
        out: the run's output folder.
        panels: at most 12 rows for the reconstructions figure; none leaves that figure out.
        rows: of the run, as `read_rows` gives them; None to read them here.

    Returns:
        the path of report.html.

    Raises:
        UsageError: rows.jsonl or run.json is missing or damaged.
    """
    out = Path(out)
    rows = read_rows(out) if rows is None else rows
    run, rounds, summary = _load_run(out / "run.json"), _load_rounds(out / "rounds.csv"), summarise(rows)
    for name, text in summary_files(rows, summary).items():
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
        notes=[*run.get("notes", []), *noticed(run, load_failures(out)), *notes(rows)],
    )
    return page


def summary_files(rows: pd.DataFrame, summary: pd.DataFrame | None = None) -> dict[str, str]:
    """Content of summary.csv and summary.tex for a run's rows; `summary` is that of the rows, None to make it here."""
    summary = summarise(rows) if summary is None else summary
    return {"summary.csv": as_csv(rows, summary), "summary.tex": as_latex(summary)}


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
