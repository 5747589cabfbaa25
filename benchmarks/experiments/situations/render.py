"""The table of situations: what was answered before, and what is answered now."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from experiments.rendering import Rendering, markdown_table
from experiments.situations.answers import Answer
from fedmjp.records.files import read_record

WIDTH = 260  # characters of an answer in the table


def read_answers(path: Path) -> dict[str, Answer]:
    """The answers of one column by situation; none where there is no file.

    Raises:
        UsageError: the file is not as it was written.
    """
    kept = read_record(path, "restore it") if path.is_file() else {}
    return {name: Answer(**answer) for name, answer in kept.items()}


def situations_block(folder: Path) -> str:
    """One table for each of the command line, `audit_gradient` and `Watcher`."""
    from experiments.situations.cases import GROUPS

    before, now = (read_answers(folder / f"{column}.json") for column in ("before", "now"))
    parts = []
    for title, group in GROUPS.items():
        lines = [[what, _cell(before[name]), _cell(now[name])] for name, (what, _) in group.items()]
        parts += [f"### `{title}`", markdown_table(["situation", "answer before", "answer now"], lines)]
    return "\n\n".join(parts)


def _cell(answer: Answer) -> str:
    """The verdict in bold, and what else is said."""
    said = re.sub(rf"^{re.escape(answer.kind)}[:.] ", "", answer.words, flags=re.IGNORECASE)
    return f"**{answer.kind}**: {textwrap.shorten(said, WIDTH, placeholder=' …')}".replace("|", "\\|")


SITUATIONS = Rendering("situations", blocks={"situations": situations_block})
RENDERINGS = (SITUATIONS,)
