"""Markdown: tables, and the blocks of a page that are rendered from results, `<!-- NAME -->` ... `<!-- /NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

BLOCK = re.compile(r"(<!-- ([a-z0-9_]+) -->\n)(?:.*?\n)?(<!-- /\2 -->)", re.DOTALL)


def differing_blocks(text: str, content: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
    """The blocks of a page that are not what they should be.

    Args:
        text: of the page.
        content: name of a block -> what it should hold, or None for one that is left as it is.

    Yields:
        name of the block, and the page with this block and those before it as they should be.
    """
    for found in BLOCK.finditer(text):
        made = content(found.group(2))
        whole = found.group() if made is None else f"{found.group(1)}{made}\n{found.group(3)}"
        if whole != found.group():
            text = text.replace(found.group(), whole)
            yield found.group(2), text


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Args:
        heads: of the columns.
        lines: of cells, as many as there are heads.
    """
    return "\n".join([_line(heads), "|" + "---|" * len(heads), *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
