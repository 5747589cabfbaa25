"""Options of the rendering of committed results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.scaffold import RESULTS


@dataclass(frozen=True)
class Options:
    """Render tables and Markdown blocks from the committed results, or check that they are what the results give.

        python benchmarks/render.py              rewrite what differs
        python benchmarks/render.py --check      write nothing; exit with 1 and name what differs

    Every room of benchmarks/experiments registers what it renders: files in results/ from the rows beside them, and the
    text between `<!-- NAME -->` and `<!-- /NAME -->` in README.md and in docs/. No figure there is typed by hand.
    """

    check: bool = False
    """Write nothing, and exit with 1 where something differs."""
    figures: bool = False
    """Also draw the figures that need nothing but rows and tables."""
    root: Path = RESULTS.parent
    """Folder with results/, README.md and docs/."""
