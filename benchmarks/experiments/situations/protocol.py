"""Run the situations under one version of the project, and keep the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from attacks.registry import UsageError
from experiments.scaffold import BENCHMARKS
from experiments.situations.answers import CRASHED, Answer
from experiments.situations.ask import SECONDS
from experiments.situations.cases import CASES
from experiments.situations.options import Options
from experiments.situations.render import SITUATIONS, read_answers
from fedmjp.records import provenance
from fedmjp.records.files import read_record, write_record


def run(options: Options, console: Console) -> None:
    """Write OUT/COLUMN.json and OUT/run.json."""
    unknown = [name for name in options.only if name not in CASES]
    if unknown:
        raise UsageError(f"--only {unknown[0]} is no situation; choose from: {', '.join(CASES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.column}.json"
    answers, seconds = read_answers(path), {}
    for name, answer, taken in asked(options.only or list(CASES), options.tree.resolve()):
        answers[name] = answer
        seconds |= {} if taken is None else {name: taken}
        console.print(f"{name}: {answer.kind}. {answer.words}", highlight=False, markup=False, soft_wrap=True)
        kept = {key: vars(answers[key]) for key in CASES if key in answers}
        write_record(path, kept)
    _note(options, seconds)
    SITUATIONS.write(options.out)


def asked(names: Sequence[str], tree: Path) -> Iterator[tuple[str, Answer, float | None]]:
    """The answers under the version in `tree` with their seconds of CPU time.

    A situation that ends its process gets what is known of the end, and no time.
    """
    path = os.pathsep.join([str(tree), str(BENCHMARKS)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    left = list(names)
    while left:
        command = [sys.executable, "-m", "experiments.situations.ask", *left]
        with subprocess.Popen(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                name, kind, words, seconds = json.loads(line)
                left.remove(name)
                yield name, Answer(kind, words), seconds
            said = process.stderr.read().strip().splitlines()
        if left:
            ended = f"still running after {SECONDS} s" if process.returncode == -14 else (said or ["killed"])[-1]
            yield left.pop(0), Answer(CRASHED, ended), None


def _note(options: Options, seconds: Mapping[str, float]) -> None:
    """Which version answered for which column, and each situation's CPU seconds; those of earlier calls are kept."""
    path = options.out / "run.json"
    run = read_record(path, "restore it") if path.is_file() else {"command": "python benchmarks/situations.py"}
    git = ["git", "-C", str(options.tree), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    taken = run.get(options.column, {}).get("seconds", {}) | seconds
    run[options.column] = {"commit": commit or provenance.commit(), "versions": provenance.versions(), "seconds": taken}
    write_record(path, run)
