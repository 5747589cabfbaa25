"""Progress display of a run: a bar per federation, and a line per round with the mean PSNR of each attack."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class RunProgress:
    """Shows the progress of a run on `console`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task = None
        self._defense, self._rounds = "", 0
        self._psnr: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def federation(self, defense: str, rounds: int, clients: int, finished: int) -> Iterator[None]:
        """Context that shows one federation's bar, which advances with each client's update.

        Args:
            defense: name of the federation's defence.
            rounds: rounds of the federation.
            clients: clients sampled per round.
            finished: rounds finished by an earlier run.
        """
        self._defense, self._rounds = defense, rounds
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as self._bar:
            self._task = self._bar.add_task(
                f"{defense}: client updates", total=rounds * clients, completed=finished * clients
            )
            yield

    def attack_done(self, attack: str, psnr: list[float]) -> None:
        """Record an attack's PSNR (dB, one per image) on one update; NaN values are ignored."""
        self._psnr[attack] += [p for p in psnr if not math.isnan(p)] or []
        self._psnr.setdefault(attack, [])
        self._bar.update(self._task, description=f"{self._defense}: {attack}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, highlight=False)

    def client_done(self) -> None:
        """Advance the bar after a client's update has been received and audited."""
        self._bar.advance(self._task)

    def round_done(self, number: int, loss: float, accuracy: float, seconds: float) -> None:
        """Print the line of round `number`: loss, accuracy in [0, 1], seconds, and the mean PSNR of each attack."""
        attacks = "  ".join(f"{a} {fmean(v):.1f} dB" if v else f"{a} -" for a, v in self._psnr.items())
        self._psnr.clear()
        self.console.print(
            Text(self._defense, "bold"),
            f"round {number}/{self._rounds}  loss {loss:.3f}  accuracy {accuracy:.1%}  {seconds:.1f} s  {attacks}",
            highlight=False,
        )
