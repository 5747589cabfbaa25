"""Resume a command from what a SIGKILL at each of its file operations leaves, and compare with an unbroken run.

    python -m tests.crash                              every operation of simulate, train and april_attack
    python -m tests.crash --command train --points 3   three of them, spread evenly
    python -m tests.crash --kill                       a process killed for each, instead of one that is copied

Operations are what the process does below --out: opening a file to write, renaming, removing, making folders, and the
low-level writes, truncations and flushes of the row log. A killed process leaves what is on disk, without what it has
not written yet; so one unbroken run suffices, whose folder is copied before each operation, and at half of the bytes of
a write. Copies that hold the same are resumed once. Each run is a fork of this process, which has gone through a run
before: imports, photographs and the texts of the help are there.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

PATHS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
PARSED: dict[tuple[str, ...], Any] = {}  # options by their arguments, without --out and --resume
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Command:
    """A command, and what of its folder must be the same after a crash.

    Attributes:
        run: from arguments to the exit code.
        arguments: without --out and --resume.
        result: from the folder to what is compared.
    """

    run: Callable[[list[str]], int]
    arguments: tuple[str, ...]
    result: Callable[[Path], Any]


def parsed_once(module: Any) -> Any:
    """A patch of a module's `parse`, under which arguments that differ in --out and --resume alone are parsed once."""
    parse = module.parse

    def parse_or_recall(options: type, program: str, description: Any, arguments: list[str], *default: Any) -> Any:
        *own, _, out = (argument for argument in arguments if argument != "--resume")
        if tuple(own) not in PARSED:
            PARSED[tuple(own)] = parse(options, program, description, arguments, *default)
        return replace(PARSED[tuple(own)], out=Path(out), resume="--resume" in arguments)

    return patch.object(module, "parse", parse_or_recall)


def _simulate(arguments: list[str]) -> int:
    from fedmjp import simulate

    # The page is rendered from rows, and can be again.
    with parsed_once(simulate), patch.object(simulate, "report", lambda folder, console: folder.out):
        return simulate.main(arguments)


def _train(arguments: list[str]) -> int:
    from matplotlib.figure import Figure

    from fedmjp import train
    from fedmjp.report.styles import save
    from fedmjp.training import folder

    with (
        parsed_once(train),
        patch.object(folder, "history_figure", lambda rows, path: save(Figure(), path)),  # the same files, sooner
    ):
        return train.main(arguments)


def _april_attack(arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import april_attack
    from experiments import scaffold
    from experiments.leakage import protocol, render
    from matplotlib.figure import Figure

    from fedmjp.report.styles import save

    with (
        parsed_once(scaffold),
        patch.object(protocol.Run, "picture", lambda self, subjects: None),
        patch.object(protocol, "rendered_table", lambda folder: None),  # the files are written; printed once more
        patch.object(protocol, "leakage_text", lambda table, block: ""),
        patch.object(render, "condition_figure", lambda points, path: save(Figure(), path)),  # the same files, sooner
    ):
        return april_attack.main(arguments)


def _of_simulate(out: Path) -> Any:
    with (out / "rounds.csv").open(newline="") as file:
        rounds = [{name: v for name, v in row.items() if name != "seconds"} for row in csv.DictReader(file)]
    pictures = {str(p.relative_to(out)): _digest(p) for p in (out / "images").rglob("*.png")}
    finished = json.loads((out / "run.json").read_text())["finished"]
    return _rows(out / "rows.jsonl"), rounds, pictures, finished, (out / "state").exists()


def _of_train(out: Path) -> Any:
    return _digest(out / "model.safetensors"), len((out / "history.csv").read_text().splitlines())


def _of_april_attack(out: Path) -> Any:
    from fedmjp.records.rows import load_rows

    rows = load_rows(out / "rows.jsonl.gz").drop(columns="seconds")
    record = json.loads((out / "run.json").read_text())
    return rows.to_json(), record["finished"], record["rows"], _digest(out / "images.sha256")


MODEL = ("--model", "vit_micro_32", "--threads", "1")
COMMANDS = {
    "simulate": Command(
        _simulate,
        (*MODEL, "--clients", "2", "--rounds", "2", "--attacks", "patch_embedding", "--train-limit", "4")
        + ("--test-limit", "2", "--audit-clients", "0", "--defense", "none"),
        _of_simulate,
    ),
    "train": Command(
        _train,
        (*MODEL, "--weights", "random", "--data", "photos", "--train-limit", "8", "--test-limit", "2")
        + ("--batch-size", "8", "--epochs", "2", "--warmup-epochs", "0"),
        _of_train,
    ),
    "april_attack": Command(
        _april_attack,
        (*MODEL, "--weights", "random", "--block", "standard", "--attacks", "patch_embedding")
        + ("--defense", "none", "--num-images", "2", "--batch-size", "1"),
        _of_april_attack,
    ),
}


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Reaction = Callable[[int, str], None]  # to an operation, by its number in the process, from 1, and its name


def never(number: int, what: str) -> None:
    """An unbroken run."""


def killed_at(place: int) -> Reaction:
    """The process ends at the operation of this number."""

    def react(number: int, what: str) -> None:
        if number == place:
            os.kill(os.getpid(), signal.SIGKILL)

    return react


class Copies:
    """Copies of a folder at the operations of a process, one for all operations that leave the same in it."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder, self.known = out, folder, set[str]()
        folder.mkdir()

    def __call__(self, number: int, what: str) -> None:
        content = held(self.out)
        if content and content not in self.known:
            self.known.add(content)
            shutil.copytree(self.out, self.folder / str(number))


def held(folder: Path) -> str:
    """A digest of the names and bytes of what a folder holds; "" for nothing, which is nothing to resume."""
    found = sorted(folder.rglob("*")) if folder.exists() else []
    parts = (f"{path.relative_to(folder)} {_digest(path) if path.is_file() else ''}" for path in found)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if found else ""


class Counter:
    """Counts the file operations below a folder, and reacts to each before it is done, or half done for a write."""

    def __init__(self, out: Path, react: Reaction, log: Path) -> None:
        self.out, self.react, self.count = str(out), react, 0
        self.log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        self._write, self._fsync = os.write, os.fsync
        sys.addaudithook(self._audited)
        os.write, os.fsync = self._written, self._flushed

    def _audited(self, event: str, arguments: tuple) -> None:
        if event not in PATHS or not str(arguments[0]).startswith(self.out):
            return
        if event == "open" and not ((arguments[2] or 0) & WRITES):
            return
        self.step(f"{event} {str(arguments[0])[len(self.out) :]}")

    def _below(self, descriptor: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self.out)
        except OSError:
            return False

    def _written(self, descriptor: int, content: Any) -> int:
        if descriptor == self.log or not self._below(descriptor):
            return self._write(descriptor, content)
        content = bytes(content)
        done = self._write(descriptor, content[: len(content) // 2])
        self.step("write")
        return done + self._write(descriptor, content[done:])

    def _flushed(self, descriptor: int) -> None:
        if self._below(descriptor):
            self.step("fsync")  # without waiting for the disk: a killed process leaves what it has written anyway
        else:
            self._fsync(descriptor)

    def step(self, what: str) -> None:
        self.count += 1
        self._write(self.log, f"{what}\n".encode())
        self.react(self.count, what)


def forked(command: Command, out: Path, react: Reaction = never, resume: bool = False) -> tuple[int, list[str], str]:
    """(exit code, or -9 where it was killed, operations done, what it printed) of the command in a fork."""
    events, printed = out.with_suffix(".events"), out.with_suffix(".log")
    child = os.fork()
    if not child:
        gc.freeze()  # what this process holds is not looked through again, page by page
        code = 99
        try:
            descriptor = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
            sys.argv = ["command"]
            Counter(out, react, events)
            code = command.run([*command.arguments, "--out", str(out), *(["--resume"] if resume else [])])
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), events.read_text().splitlines(), printed.read_text()


def unbroken(command: Command, folder: Path, react: Reaction = never) -> tuple[list[str], Any]:
    """(operations, what is compared) of a run that is not killed, after one in this process.

    Raises:
        RuntimeError: it fails.
    """
    out, said = folder / "run", io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command.run([*command.arguments, "--out", str(folder / "before")])
    if code:
        raise RuntimeError(f"a run in this process ends with {code}: {said.getvalue()[-2000:]}")
    code, events, printed = forked(command, out, react)
    if code:
        raise RuntimeError(f"the unbroken run ends with {code}: {printed[-2000:]}")
    return events, command.result(out)


def resumed(command: Command, out: Path, wanted: Any) -> str:
    """What went wrong with a command that was killed and is resumed to its end; "" for nothing."""
    code, _, printed = forked(command, out, resume=bool(held(out)))
    if code:
        return f"resumed with exit code {code}: {printed.strip()[-500:]}"
    if command.result(out) != wanted:
        return "other results"
    left = [str(p.relative_to(out)) for p in out.rglob("*") if p.suffix in (".tmp", ".part")]
    return f"left {left}" if left else ""


def killed(command: Command, out: Path, place: int, wanted: Any) -> str:
    """What went wrong with a command that is killed at an operation and resumed; "" for nothing."""
    shutil.rmtree(out, ignore_errors=True)
    code, _, _ = forked(command, out, killed_at(place))
    if code != -signal.SIGKILL:
        return f"not killed, but ends with {code}"
    return resumed(command, out, wanted)


def copied(command: Command, out: Path, copy: Path, wanted: Any) -> str:
    """What went wrong with a command that is resumed from a copy of its folder; "" for nothing."""
    shutil.rmtree(out, ignore_errors=True)
    copy.rename(out)
    return resumed(command, out, wanted)


def check(name: str, folder: Path, points: int = 0, kill: bool = False) -> list[str]:
    """What went wrong with a command that is interrupted at `points` of its operations, spread evenly; 0 for all.

    Args:
        kill: a process for every point, instead of copies of one.
    """
    command, out, copies = COMMANDS[name], folder / "run", folder / "copies"
    events, wanted = unbroken(command, folder, never if kill else Copies(out, copies))
    places = list(range(1, len(events) + 1)) if kill else sorted(int(path.name) for path in copies.iterdir())
    if points:
        places = sorted({places[round((len(places) - 1) * (i + 1) / (points + 1))] for i in range(points)})
    failures = []
    for place in places:
        wrong = killed(command, out, place, wanted) if kill else copied(command, out, copies / str(place), wanted)
        if wrong:
            failures.append(f"{name}, operation {place} of {len(events)} ({events[place - 1]}): {wrong}")
            print(failures[-1], flush=True)
    what = f"killed at {len(places)}" if kill else f"resumed from {len(places)} states"
    print(f"{name}: {what} of {len(events)} file operations, {len(failures)} failures", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--command", choices=COMMANDS, nargs="*", default=list(COMMANDS))
    parser.add_argument("--points", type=int, default=0, help="operations to interrupt at (0: all)")
    parser.add_argument("--kill", action="store_true", help="kill a process at each, instead of copying one's folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.command:
        with tempfile.TemporaryDirectory() as folder:
            found += check(name, Path(folder), options.points, options.kill)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
