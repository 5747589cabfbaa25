"""Kill a command at each of its file operations, resume it, and compare with an unbroken run.

    python -m tests.crash                              every operation of simulate, train and april_attack
    python -m tests.crash --command train --points 3   three of them, spread evenly

Operations are what the process does below --out: opening a file to write, renaming, removing, making folders, and the
low-level writes, truncations and flushes of the row log. A write is killed after half of its bytes. Each run is a fork
of this process, which imports what the unbroken run has imported, so that no other fork has to.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PATHS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
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


def _simulate(arguments: list[str]) -> int:
    from fedmjp import simulate

    simulate.report = lambda folder, console: folder.out  # the page is rendered from rows, and can be again
    return simulate.main(arguments)


def _train(arguments: list[str]) -> int:
    from fedmjp import train

    return train.main(arguments)


def _april_attack(arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import april_attack
    from experiments.leakage import protocol

    protocol.Run.picture = lambda self, subjects: None
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
        (*MODEL, "--clients", "2", "--rounds", "2", "--attacks", "patch_embedding", "--test-limit", "2")
        + ("--audit-clients", "0", "--defense", "none"),
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


When = Callable[[int, str], bool]  # whether to kill at an operation, by its number in the process, from 1, and its name


def never(number: int, what: str) -> bool:
    """An unbroken run."""
    return False


class Counter:
    """Counts the file operations below a folder, and kills the process at one of them."""

    def __init__(self, out: Path, kill_when: When, log: Path) -> None:
        self.out, self.kill_when, self.count = str(out), kill_when, 0
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
        if descriptor != self.log and self._below(descriptor):
            if self.kill_when(self.count + 1, "write"):
                self._write(descriptor, bytes(content)[: len(content) // 2])
            self.step("write")
        return self._write(descriptor, content)

    def _flushed(self, descriptor: int) -> None:
        if self._below(descriptor):
            self.step("fsync")
        self._fsync(descriptor)

    def step(self, what: str) -> None:
        self.count += 1
        self._write(self.log, f"{what}\n".encode())
        if self.kill_when(self.count, what):
            os.kill(os.getpid(), signal.SIGKILL)


def forked(command: Command, out: Path, kill_when: When = never, resume: bool = False) -> tuple[int, list[str], str]:
    """(exit code, or -9 where it was killed, operations done, what it printed) of the command in a fork."""
    events, printed = out.with_suffix(".events"), out.with_suffix(".log")
    child = os.fork()
    if not child:
        code = 99
        try:
            descriptor = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
            sys.argv = ["command"]
            Counter(out, kill_when, events)
            code = command.run([*command.arguments, "--out", str(out), *(["--resume"] if resume else [])])
            out.with_suffix(".modules").write_text("\n".join(sys.modules))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), events.read_text().splitlines(), printed.read_text()


def unbroken(command: Command, folder: Path) -> tuple[list[str], Any]:
    """(operations, what is compared) of a run that is not killed, whose imports are those of this process from now on.

    Raises:
        RuntimeError: it fails.
    """
    out = folder / "unbroken"
    code, events, printed = forked(command, out)
    if code:
        raise RuntimeError(f"the unbroken run ends with {code}: {printed[-2000:]}")
    for name in out.with_suffix(".modules").read_text().splitlines():
        with contextlib.suppress(Exception):  # the names that a package gives to parts of others
            importlib.import_module(name)
    return events, command.result(out)


def begun(out: Path) -> bool:
    """Whether there is something to resume."""
    return out.exists() and any(out.iterdir())


def resumed(command: Command, out: Path, wanted: Any) -> str:
    """What went wrong with a command that was killed and is resumed to its end; "" for nothing."""
    code, _, printed = forked(command, out, resume=begun(out))
    if code:
        return f"resumed with exit code {code}: {printed.strip()[-500:]}"
    if command.result(out) != wanted:
        return "other results"
    left = [str(p.relative_to(out)) for p in out.rglob("*") if p.suffix in (".tmp", ".part")]
    return f"left {left}" if left else ""


def killed(command: Command, out: Path, place: int, wanted: Any) -> str:
    """What went wrong with a command that is killed at an operation and resumed; "" for nothing."""
    code, _, _ = forked(command, out, kill_when=lambda number, what: number == place)
    if code != -signal.SIGKILL:
        return f"not killed, but ends with {code}"
    return resumed(command, out, wanted)


def kind_of(what: str) -> str:
    """open, os.rename, os.remove, os.rmdir, os.mkdir, os.truncate, write or fsync."""
    return what.split()[0]


def check_kinds(name: str, folder: Path) -> str:
    """What went wrong with a command killed at each kind of its operations in turn, resumed each time; "" for nothing.

    Every process goes on where the last one was killed, by at least its part of the whole, so that all kinds together
    take about as long as two unbroken runs.
    """
    command, out = COMMANDS[name], folder / "run"
    events, wanted = unbroken(command, folder)
    kinds = list(dict.fromkeys(map(kind_of, events)))
    step = len(events) // (len(kinds) + 1)
    for kind in kinds:
        code, done, printed = forked(command, out, _at(kind, step), resume=begun(out))
        if not code:  # what was left holds none of this kind
            shutil.rmtree(out)
            code, done, printed = forked(command, out, _at(kind, 1))
        if code != -signal.SIGKILL or kind_of(done[-1]) != kind:
            return f"not killed at {kind}, but ends with {code}: {printed.strip()[-500:]}"
    print(f"{name}: killed at {', '.join(kinds)}", flush=True)
    return resumed(command, out, wanted)


def _at(kind: str, least: int) -> When:
    """At the first operation of that kind whose number is at least `least`."""
    return lambda number, what: number >= least and kind_of(what) == kind


def check(name: str, folder: Path, points: int = 0) -> list[str]:
    """What went wrong with a command killed at `points` of its operations, spread evenly; 0 for all of them."""
    command, out = COMMANDS[name], folder / "run"
    events, wanted = unbroken(command, folder)
    failures = []
    places = range(1, len(events) + 1)
    if points:
        places = sorted({1 + round((len(events) - 1) * (i + 1) / (points + 1)) for i in range(points)})
    for place in places:
        shutil.rmtree(out, ignore_errors=True)
        if wrong := killed(command, out, place, wanted):
            failures.append(f"{name}, operation {place} of {len(events)} ({events[place - 1]}): {wrong}")
            print(failures[-1], flush=True)
    print(
        f"{name}: killed at {len(list(places))} of {len(events)} file operations, {len(failures)} failures", flush=True
    )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--command", choices=COMMANDS, nargs="*", default=list(COMMANDS))
    parser.add_argument("--points", type=int, default=0, help="operations to kill at (0: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.command:
        with tempfile.TemporaryDirectory() as folder:
            found += check(name, Path(folder), options.points)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
