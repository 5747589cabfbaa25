"""fedmjp-leaderboard: add a defence, render the page, verify a submission, list them. Also `python -m
fedmjp.leaderboard`.

What computes is imported after the options are read and checked.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from attacks import UsageError
from fedmjp.cli import EXIT_FAILURE, guarded, parse, terminal
from fedmjp.leaderboard.protocol import TRACKS, slug, track_of
from fedmjp.leaderboard.tiers import tier_called
from fedmjp.workers.options import WorkerConfig

TRACK_HELP = "How much is run: " + "; ".join(f"{track.name}: {track.meaning}" for track in TRACKS.values()) + "."


class Differs(Exception):
    """A submission's rows are not what a re-run gives; the text says which."""


@dataclass(frozen=True)
class Add:
    """Run the protocol on a defence and write its file, rows and picture; an interrupted run is taken up."""

    defense: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DEFENSE")]
    """A registered defence: NAME, NAME:option=value,option=value, or several joined by "+"."""
    track: Annotated[str, tyro.conf.arg(help=TRACK_HELP)] = "small"
    images: Path | None = None
    """A folder of your own images (CLASS/FILE); the submission is then labelled as not comparable."""
    results: Path = Path("results/leaderboard")
    """Folder of the leaderboard."""
    work: Path = Path("runs/leaderboard")
    """Folder of the federations; each submission has one of its own in it."""
    computing: WorkerConfig = field(default_factory=WorkerConfig)
    only_missing: bool = False
    """Run only what the submission lacks of the protocol, which may have grown; its other rows stay as they are."""
    tiers: tuple[str, ...] = ()
    """Run these threat tiers alone (none given: all), of a defence that takes long; its card names what it lacks."""

    def run(self, console: Console) -> None:
        """Do it.

        Raises:
            UsageError, ClientFailure: see `submission.add` and `submission.extend`.
        """
        track, name = track_of(self.track), slug(self.defense)
        if self.images is not None and not self.images.is_dir():
            raise UsageError(f"--images {self.images} is no folder; lay images out as CLASS/FILE")
        for tier in self.tiers:
            tier_called(tier)
        from fedmjp.leaderboard.submission import Submission, add, extend

        work = self.work / f"{name}@{track.name}"
        work = work if self.images is None else work.with_name(f"{work.name}@{self.images.name}")
        submission = Submission(self.defense, track, work, self.results, self.images, self.computing, self.tiers)
        written = (extend if self.only_missing else add)(submission, console)
        console.print(f"written: {written}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Verify:
    """Compute a submission's figures again from its rows, and run a random tenth of its updates again; code 1 where
    something differs."""

    file: Annotated[Path, tyro.conf.Positional]
    """The submission's JSON file; its rows are beside it."""
    seed: int | None = None
    """Of the choice of updates (none given: a new one, which is printed)."""
    images: Path | None = None
    """The folder of a submission on images of its own."""
    record: bool = False
    """Note in the file that the re-run gave the same."""

    def run(self, console: Console) -> None:
        """Do it.

        Raises:
            Differs: the submission is not what a re-run gives.
            UsageError, ClientFailure: see `verify.compare`.
        """
        from fedmjp.leaderboard.verify import compare, record

        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        with tempfile.TemporaryDirectory() as folder:
            found = compare(self.file, seed, Path(folder), console, self.images)
        for line in found.undetermined:
            console.print(f"not determined by the seed: {line}", highlight=False, soft_wrap=True)
        if found.differences:
            raise Differs("\n".join([f"{self.file.name} differs:", *found.differences]))
        if self.record:
            record(self.file, seed, found)
        besides = f" but for {len(found.rows)} rows that rounding changes" if found.rows else ""
        console.print(f"{self.file.name}: nothing differs{besides}", highlight=False)


@dataclass(frozen=True)
class Render:
    """Fill the leaderboard's blocks in pages: <!-- leaderboard --> (table, plane and cards) and
    <!-- leaderboard_small -->."""

    results: Path = Path("results/leaderboard")
    """Folder of the leaderboard."""
    pages: tuple[Path, ...] = (Path("docs/leaderboard.md"), Path("README.md"))
    """Markdown files with such blocks."""

    def run(self, console: Console) -> None:
        """Do it.

        Raises:
            UsageError: see `page.render`.
        """
        from fedmjp.leaderboard.page import render

        for one in render(self.results, self.pages) or ["nothing differs"]:
            console.print(one, highlight=False)


@dataclass(frozen=True)
class List:
    """Name the submissions, the worst case of each, and whether they can be compared."""

    results: Path = Path("results/leaderboard")
    """Folder of the leaderboard."""

    def run(self, console: Console) -> None:
        """Do it.

        Raises:
            UsageError: no submission there.
        """
        from fedmjp.leaderboard.listing import listing

        console.print(listing(self.results))


Command = (
    Annotated[Add, tyro.conf.subcommand("add")]
    | Annotated[Render, tyro.conf.subcommand("render")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[List, tyro.conf.subcommand("list")]
)
DESCRIPTION = "The leaderboard of defences: one protocol for all, a file for each."


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 for a failed client or a submission that differs, 2 for a mistake of
    usage, 130 for an interrupt."""
    command = parse(Command, "fedmjp-leaderboard", DESCRIPTION, arguments)

    def work() -> None:
        """The subcommand."""
        command.run(terminal())

    try:
        return guarded(work, lambda: "what is finished is kept; the same command goes on")
    except Differs as differing:
        print(f"error: {differing}", file=sys.stderr)
        return EXIT_FAILURE
