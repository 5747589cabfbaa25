"""run.json: what a benchmark was asked, with which versions, commits and machines its rows were made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from fedmjp.records import provenance


def note_run(out: Path, program: str, rows: pd.DataFrame, **more: Any) -> None:
    """Write or bring up to date `out`/run.json; the commands of earlier calls, which --resume took up, are kept.

    Args:
        program: the command without its options.
        rows: all rows of the folder (`commit` and `device` are read).
        more: further entries; lists are joined with those of earlier calls.
    """
    file = out / "run.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    joined = {k: sorted({*before.get(k, []), *v}) if isinstance(v, list) else v for k, v in more.items()}
    record = {
        "commands": [*before.get("commands", []), " ".join([program, *sys.argv[1:]])],
        **joined,
        "versions": provenance.versions(),
        "commits": sorted(rows["commit"].unique()),
        "devices": sorted(rows["device"].unique()),
        "weights": sorted(set(zip(rows["model"], rows["weights"], strict=True))),
        "rows": len(rows),
    }
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
