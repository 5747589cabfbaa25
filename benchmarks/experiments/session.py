"""One call of a command that writes rows: device and precision, the row log, progress, tables, run.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attacks import ATTACKS, Attack, Observation, ThreatModel
from attacks.base import FAILED
from attacks.registry import UsageError
from experiments.rendering import Rendering, read_one_seed, read_rows
from experiments.scaffold import AttackOptions, DeviceOptions, Failure, RowOptions, WorkerOptions
from fedmjp.audit.harness import ScoreImages, scorer
from fedmjp.audit.suite import select_attacks
from fedmjp.audit.victims import Victims
from fedmjp.budgets import ALL, AUTO
from fedmjp.data import Gallery, load_gallery
from fedmjp.defenses import Defense
from fedmjp.devices import usable_device, use_threads
from fedmjp.metrics import load_lpips
from fedmjp.records import provenance
from fedmjp.records.image_digests import FILE, ImageDigests
from fedmjp.records.lock import FolderLock
from fedmjp.records.rows import RESULTS, RowLog, Schema, pack_rows, unpack_rows
from fedmjp.records.run_record import note_rows, note_start
from fedmjp.workers.schedule import NOT_ATTACKED

# Options that decide about no number.
_NEUTRAL = {"out", "resume", "device", "threads", "workers", "ray", "batch_size", "together"}
_DECODED = 64  # images at a time


def prepare_torch(options: DeviceOptions) -> torch.device:
    """The device asked for, with the number of threads asked for.

    Raises:
        UsageError: no such device here.
    """
    use_threads(1 if getattr(options, "spread", False) else options.threads)
    return usable_device(options.device)


class Session:
    """One call of a command that writes rows.

    Attributes:
        device: where it computes.
        columns: what every row says of the call (`run_id` and `provenance.columns`).
    """

    def __init__(self, options: RowOptions, console: Console, schema: Schema = RESULTS) -> None:
        self.options, self.console, self.out, self._schema = options, console, options.out, schema
        self.device = prepare_torch(options)
        asked = {k: str(v) for k, v in vars(options).items() if k not in _NEUTRAL}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}
        self._said: dict[str, None] = {}
        self._locked, self._galleries, self._compared = False, list[Gallery](), set[tuple[str, int, str]]()

    def say(self, line: str) -> None:
        """Print a line, unless it was printed before."""
        if line not in self._said:
            self._said[line] = None
            self.console.print(line, highlight=False)

    @property
    def left_out(self) -> list[str]:
        """Lines said of pictures that could not be read."""
        return [line for line in self._said if line.startswith("left out")]

    @property
    def not_attacked(self) -> list[str]:
        """Lines said of batches that were given up (`fedmjp.workers.Lost.lines`)."""
        return [line for line in self._said if line.startswith(NOT_ATTACKED)]

    def require_all(self) -> None:
        """End the command with an error where batches were given up; called once all else is written.

        Raises:
            Failure: names the first of them.
        """
        if given_up := self.not_attacked:
            more = f" and {len(given_up) - 1} more lines in run.json" if len(given_up) > 1 else ""
            raise Failure(f"{given_up[0]}{more}; the other rows are in {self.out}, --resume tries again")

    @contextmanager
    def rows(self, defense: Defense | None = None, seed: int | None = None) -> Iterator[RowLog]:
        """The folder's rows, to append to; packed where the block ends without an exception.

        run.json is there before the first row, and says that they are not finished. Galleries loaded before are
        compared with the folder's pictures first (`check_images`).

        Args:
            defense: the one that all rows of the same name must be of, with its options; None where a command runs
                several.
            seed: the one that all rows must be of, where the table counts images under one (`read_one_seed`); None
                where it takes several.

        Raises:
            UsageError: rows of the folder are of the same defence with other options, of another seed, or of other
                pictures; no row is changed.
        """
        path = self.out / "rows.jsonl"
        if any(self.out.glob("rows.jsonl*")):
            if defense is not None:
                self._require_same(defense)
            if seed is not None:
                read_one_seed(self.out, self._schema, seed)
        self.out.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.out)
        try:
            self._locked = True
            while self._galleries:
                self.check_images(self._galleries.pop(0))
            note_start(self.out)
            unpack_rows(path)
            with RowLog(path, self._schema) as rows:
                if rows.repaired:
                    self.say("the last row was half-written: it is computed again")
                yield rows
        finally:
            self._locked = False
            lock.release()
        if not path.stat().st_size:
            self.require_all()
            raise UsageError(f"no picture of --images {self.options.images} can be read; nothing was attacked")
        pack_rows(path)

    def gallery(self, place: str, *, size: int, limit: int | None = None, path: Path | None = None) -> Gallery:
        """Images that rows are about: `fedmjp.data.load_gallery`, then `check_images`.

        Raises:
            UsageError: no such images, or others than before.
        """
        gallery = load_gallery(place, size=size, limit=limit, path=path)
        self.check_images(gallery)
        return gallery

    def check_images(self, gallery: Gallery) -> None:
        """Refuse to go on with other pictures than the folder's rows are about, those of complete rows as well.

        Pictures that the folder has no digest of are noted: a later call may attack more of them, or fewer. Outside
        of a block of `rows`, where another process may write to the folder, the comparison waits for the next block.

        Raises:
            UsageError: see `ImageDigests.check`.
        """
        if not self._locked:
            self._galleries.append(gallery)
            return
        images, digests = gallery.images, ImageDigests(self.out, gallery.name)
        keys = [(gallery.name, images.size, name) for name in images.ids]
        fresh = [index for index, key in enumerate(keys) if key not in self._compared]
        for found in replace(gallery, images=images.subset(fresh)).contents(_DECODED):
            digests.check_contents(list(found), list(found.values()), images.size)
        self._compared |= set(keys)

    def _require_same(self, defense: Defense) -> None:
        rows, asked = read_rows(self.out, self._schema), json.loads(json.dumps(defense.parameters()))
        own = rows.loc[rows["defense"] == self.options.defense, "defense_parameters"]
        for found in own:
            changed = sorted(name for name in {**found, **asked} if found.get(name) != asked.get(name))
            if changed:
                option = changed[0]
                raise UsageError(
                    f"{self.out} holds rows of {self.options.defense} with {option} {found.get(option)}, not "
                    f"{asked.get(option)}; resume with the same options or pass another --out"
                )

    def bar(self) -> Progress:
        """A progress display, to be used as a context manager."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        return Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)

    def finish(self, program: str, rendering: Rendering, **more) -> pd.DataFrame:
        """Note the call in run.json, write what is rendered from the rows, and return the rows.

        Args:
            program: how the command is typed, without its options.
            more: further entries of run.json.
        """
        rows = read_rows(self.out, self._schema)
        lines = {"joined": {"left_out": self.left_out}}
        lines |= {"not_attacked": self.not_attacked} if isinstance(self.options, WorkerOptions) else {}
        note_rows(self.out, program, rows, not self.not_attacked, **lines, **self.notes(rows), **more)
        for line in failures(rows):
            self.say(line)
        rendering.write(self.out)
        self.console.print(f"tables and figures: {self.out}", soft_wrap=True, highlight=False)
        return rows

    def notes(self, rows: pd.DataFrame) -> dict[str, Any]:
        """Entries of run.json that a kind of command adds."""
        return {}


def failures(rows: pd.DataFrame) -> list[str]:
    """A line for each attack that raised an error on some of its rows."""
    if "diagnosis" not in rows:
        return []
    failed = rows[rows["diagnosis"].fillna("").str.startswith(FAILED)]
    counts = rows["attack"].value_counts()
    return [
        f"{name} failed in {len(own)} of its {counts[name]} rows, which show nothing: {own['diagnosis'].iloc[0]}"
        for name, own in failed.groupby("attack", sort=True)
    ]


class AttackSession(Session):
    """One call of a command that scores reconstructions."""

    def __init__(self, options: AttackOptions, console: Console) -> None:
        super().__init__(options, console)
        self._lpips = load_lpips(options.lpips_net, options.lpips_weights, self.device)
        self._chosen = False
        self._left_out: dict[str, dict[str, str]] = {}

    @contextmanager
    def rows(self, defense: Defense | None = None, seed: int | None = None) -> Iterator[RowLog]:
        """See `Session.rows`.

        Raises:
            RuntimeError: rows were written of images that nothing compared with those of a run that is resumed; a
                protocol loads them by `gallery`, or passes them to `check_images`.
        """
        with super().rows(defense, seed) as rows:
            before = rows.path.stat().st_size
            yield rows
            if rows.path.stat().st_size > before and not (self.out / FILE).exists():
                raise RuntimeError(f"rows were written of images that have no digest in {self.out / FILE}")

    def suite(
        self, names: Sequence[str], observations: Sequence[Observation], threat_model: ThreatModel
    ) -> dict[str, Attack]:
        """The attacks of `SuiteOptions` on a client's updates, in the order in which they run.

        Args:
            names: of attacks, auto or all.
            observations: the updates, oldest first; read for auto alone.

        Raises:
            UsageError: a named attack needs more than the threat model grants.
        """
        budget, settings = self.options.budget_seconds(), self.options.attack_settings()
        suite = select_attacks(names, observations, threat_model, budget=budget, settings=settings)
        self._chosen = True
        for name, reason in suite.left_out.items() if {AUTO, ALL} & set(names) else ():
            alike = re.sub(r"[\d.]+", "", reason)  # updates differ in the seconds that an attack would take
            self._left_out.setdefault(name, {}).setdefault(alike, reason)
        return dict(suite.chosen)

    def notes(self, rows: pd.DataFrame) -> dict[str, Any]:
        """Under `not_run`, why registered attacks have no row; nothing where no suite was chosen in this call."""
        if not self._chosen:
            return {}
        absent = [name for name in ATTACKS if name not in set(rows["attack"])]
        reasons = {name: "; ".join(self._left_out.get(name, {}).values()) for name in absent}
        return {"not_run": {name: reason or "not among --attacks" for name, reason in reasons.items()}}

    def scorer(self, patch_size: int) -> ScoreImages:
        """From (reconstructions, originals) to one dict of metrics an image."""
        return scorer(patch_size, self._lpips)

    def victims(self, gallery: Gallery, defense: Defense, seed: int, group: int = 1) -> Victims:
        """The clients that hold the gallery's images, `group` images each."""
        for reason in gallery.skipped:
            self.say(f"left out: {reason}")
        return Victims(gallery, defense, seed=seed, device=self.device, warn=self.say, group=group)


class TableRun:
    """One call of a command that attacks, and prints the table that is rendered from its rows.

    Subclasses write the rows in `attack`.

    Attributes:
        program: how the command is typed, without its options.
        rendering: what is rendered from the rows, table.csv among it.
        one_seed: whether the table counts images under one seed (`read_one_seed`).
    """

    program: ClassVar[str]
    rendering: ClassVar[Rendering]
    one_seed: ClassVar[bool] = False

    def __init__(self, options: RowOptions, console: Console) -> None:
        self.options, self.console, self.session = options, console, self.start(options, console)

    def start(self, options: RowOptions, console: Console) -> Session:
        """The session that rows are written in."""
        return AttackSession(options, console)

    def __call__(self) -> None:
        """Attack, then write the table and print it."""
        with self.session.rows(seed=self.options.seed if self.one_seed else None) as rows:
            images = self.attack(rows)
        self.session.finish(self.program, self.rendering, images=images)
        self.console.print(pd.read_csv(self.options.out / "table.csv").to_string(index=False), highlight=False)

    def attack(self, rows: RowLog) -> str:
        """Write every row that is missing; returns the images' provenance."""
        raise NotImplementedError
