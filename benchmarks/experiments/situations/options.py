"""Options of the table of situations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from experiments.scaffold import RESULTS


@dataclass(frozen=True)
class Options:
    """Run every situation and write down what is answered: one column of the table in docs/situations.md.

        git worktree add --detach EARLIER 58a166c
        python benchmarks/situations.py --column before --tree EARLIER --out results/situations
        python benchmarks/situations.py --out results/situations

    Situations are programs that a user writes, so that they run under an earlier version as well. Each runs in a
    process that is ended after two minutes or 12 GiB.
    """

    out: Path = Path("runs/situations")
    """Folder of the answers; other columns and other situations that are there are kept."""
    column: Literal["now", "before"] = "now"
    """Column of the table."""
    tree: Path = RESULTS.parent
    """Checkout of the version that answers."""
    only: tuple[str, ...] = ()
    """Names of the situations to run (none given: all)."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is run."""
        if not (self.tree / "fedmjp" / "audit").is_dir():
            raise UsageError(f"--tree {self.tree} is no checkout of this project; it lacks fedmjp/audit")
