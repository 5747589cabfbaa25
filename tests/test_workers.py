"""Several processes: results in the order of tasks, deaths retried, what kills its process named and left out."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mjp_adaptive
import pytest
import torch

from attacks import ATTACKS, Attack, Observation, Reconstruction, UsageError
from fedmjp.audit.victims import Setting, Subject
from fedmjp.models import build_model
from fedmjp.records.rows import RowLog
from fedmjp.workers import ATTEMPTS, Lost, in_order
from tests.audit.test_campaign import campaign_on, victims_of

DEFENDED = Setting("b", defended=True, hidden=True, against="seen")


@pytest.fixture(autouse=True)
def one_thread():
    """As `--workers` computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_results_come_in_the_order_of_tasks() -> None:
    def slow_first(task: int) -> tuple[int, int]:
        time.sleep(0.2 if task == 0 else 0)
        return task, os.getpid()

    found = list(in_order(range(6), slow_first, 2))
    assert [task for task, _ in found] == [task for _, (task, _) in found] == list(range(6))
    processes = {process for _, (_, process) in found}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_one_worker_is_this_process_and_reads_tasks_one_by_one() -> None:
    read = []
    found = in_order((read.append(task) or task for task in range(3)), lambda task: os.getpid(), 1)
    assert next(found) == (0, os.getpid())
    assert read == [0]


def test_an_error_of_the_work_is_raised_after_the_results_before_it() -> None:
    def work(task: int) -> int:
        if task == 2:
            raise UsageError("two cannot be done")
        return task

    found = in_order(range(4), work, 2)
    assert [next(found)[1], next(found)[1]] == [0, 1]
    with pytest.raises(UsageError, match="two cannot be done"):
        next(found)


def test_a_worker_that_dies_is_replaced_and_a_deadly_task_given_up(tmp_path: Path) -> None:
    def work(task: int) -> int:
        with (tmp_path / str(task)).open("a") as tries:
            tries.write(".")
        if task == 3 or (task == 1 and len((tmp_path / "1").read_text()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    found = [result for _, result in in_order(range(5), work, 2)]
    assert found == [0, 1, 2, Lost(f"ended {ATTEMPTS} times with exit code -9"), 4]
    assert [len((tmp_path / str(task)).read_text()) for task in range(5)] == [1, 2, 1, ATTEMPTS, 1]


@dataclass(frozen=True, kw_only=True)
class Deadly(Attack):
    """Kills its process at one photograph: the first whose update has this norm or more."""

    at: float

    def misfit(self, observations: Sequence[Observation]) -> str:
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        if observations[0].gradient_norm() == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return ATTACKS.get("patch_embedding")()(observations)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(build_model("vit_mini_64_mjp", num_classes=8, weights="random"))


def lines(path: Path) -> list[dict]:
    """Rows in the file's order, without the column that differs between equal campaigns."""
    return [json.loads(line) | {"seconds": 0.0} for line in path.read_text().splitlines()]


def test_a_campaign_writes_the_rows_of_one_process_in_its_order(tmp_path: Path, subject) -> None:
    for workers in (1, 2):
        with RowLog(tmp_path / f"{workers}.jsonl") as rows:
            campaign_on(victims_of(), rows, 2, workers=workers).attack(subject, [DEFENDED])
    assert len(lines(tmp_path / "1.jsonl")) == 5 * 2
    assert lines(tmp_path / "2.jsonl") == lines(tmp_path / "1.jsonl")


def test_a_deadly_case_is_named_and_left_out(tmp_path: Path, subject) -> None:
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign_on(victims_of(), rows, 1).attack(subject, [DEFENDED])
    norms = {row["image_id"]: row["gradient_norm"] for row in lines(tmp_path / "rows.jsonl")}
    name, norm = list(norms.items())[2]
    warnings: list[str] = []
    with RowLog(tmp_path / "deadly.jsonl") as rows:
        attacks = {"april": ATTACKS.get("april")(), "deadly": Deadly(at=norm)}
        campaign_on(victims_of(warnings=warnings), rows, 1, attacks=attacks, workers=2).attack(subject, [DEFENDED])
    assert warnings == [f"left out: {name}: the processes that worked on them ended {ATTEMPTS} times with exit code -9"]
    assert [row["image_id"] for row in lines(tmp_path / "deadly.jsonl")[::2]] == [n for n in norms if n != name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "0"], "--workers must be at least 1, not 0"),
        (["--workers", "2", "--threads", "2"], "--workers gives each process one thread; leave out --threads"),
        (["--workers", "2", "--device", "cuda"], "leave it out with --device cuda"),
    ],
)
def test_mistakes(tmp_path, capsys, options: list[str], words: str) -> None:
    assert mjp_adaptive.main(["--out", str(tmp_path / "out"), *options]) == 2
    assert words in capsys.readouterr().err
