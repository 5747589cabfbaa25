"""Tasks side by side, on this machine and on Ray: results in the order of tasks, deaths retried, what kills its process
or raises named and left out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import mjp_adaptive
import pytest
import torch

from attacks import ATTACKS, Attack, Observation, Reconstruction, UsageError
from fedmjp import simulate
from fedmjp.audit.victims import Setting, Subject
from fedmjp.models import build_model
from fedmjp.records.rows import RowLog
from fedmjp.records.run_folder import RunFolder
from fedmjp.workers import ATTEMPTS, HERE, Lost, WorkerConfig, in_order
from tests.audit.test_campaign import campaign_on, victims_of

DEFENDED = Setting("b", defended=True, hidden=True, against="seen")
WITH_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
DEATHS = {
    "": "ended with exit code -9",
    "local": "ended with WorkerCrashedError",
}


@pytest.fixture(params=["", pytest.param("local", marks=WITH_RAY)], ids=["processes", "ray"])
def two(request) -> WorkerConfig:
    """Two workers under each executor."""
    return WorkerConfig(2, request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """As workers compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def given_up(config: WorkerConfig) -> str:
    """The reason of a task whose processes died."""
    return f"{ATTEMPTS} processes that worked on it {DEATHS[config.ray]}"


def test_results_come_in_the_order_of_tasks(two) -> None:
    def slow_first(task: int) -> tuple[int, int, int]:
        time.sleep(0.2 if task == 0 else 0)
        return task, os.getpid(), torch.get_num_threads()

    found = list(in_order(range(6), slow_first, two))
    assert [task for task, _ in found] == [task for _, (task, _, _) in found] == list(range(6))
    processes = {process for _, (_, process, _) in found}
    assert len(processes) >= 2
    assert os.getpid() not in processes
    assert {threads for _, (_, _, threads) in found} == {1}


def test_one_worker_is_this_process_and_reads_tasks_one_by_one() -> None:
    read = []
    found = in_order((read.append(task) or task for task in range(3)), lambda task: os.getpid(), HERE)
    assert next(found) == (0, os.getpid())
    assert read == [0]


def test_a_mistake_of_usage_is_raised_after_the_results_before_it(two) -> None:
    def work(task: int) -> int:
        if task == 2:
            raise UsageError("two cannot be done")
        return task

    for config in (HERE, two):
        found = in_order(range(4), work, config)
        assert [next(found)[1], next(found)[1]] == [0, 1]
        with pytest.raises(UsageError, match="two cannot be done"):
            next(found)


def test_a_task_that_raises_is_given_up_with_its_traceback(two) -> None:
    def work(task: int) -> float:
        return 1 / (task - 1)

    for config in (HERE, two):
        first, lost, last = (result for _, result in in_order(range(3), work, config))
        assert (first, last) == (-1, 1)
        assert lost.reason == "ZeroDivisionError: division by zero"
        assert "return 1 / (task - 1)" in lost.trace


def test_a_worker_that_dies_is_replaced_and_a_deadly_task_given_up(tmp_path: Path, two) -> None:
    def work(task: int) -> int:
        with (tmp_path / str(task)).open("a") as tries:
            tries.write(".")
        if task == 3 or (task == 1 and len((tmp_path / "1").read_text()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    found = [result for _, result in in_order(range(5), work, two)]
    assert found == [0, 1, 2, Lost(given_up(two)), 4]
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


def test_a_campaign_writes_the_rows_of_one_process_in_its_order(tmp_path: Path, subject, two) -> None:
    for name, config in {"serial": HERE, "spread": two}.items():
        with RowLog(tmp_path / f"{name}.jsonl") as rows:
            campaign_on(victims_of(), rows, 2, workers=config).attack(subject, [DEFENDED])
    assert len(lines(tmp_path / "serial.jsonl")) == 5 * 2
    assert lines(tmp_path / "spread.jsonl") == lines(tmp_path / "serial.jsonl")


def test_a_deadly_case_is_named_and_left_out(tmp_path: Path, subject, two) -> None:
    with RowLog(tmp_path / "rows.jsonl") as rows:
        campaign_on(victims_of(), rows, 1).attack(subject, [DEFENDED])
    norms = {row["image_id"]: row["gradient_norm"] for row in lines(tmp_path / "rows.jsonl")}
    name, norm = list(norms.items())[2]
    warnings: list[str] = []
    with RowLog(tmp_path / "deadly.jsonl") as rows:
        attacks = {"april": ATTACKS.get("april")(), "deadly": Deadly(at=norm)}
        campaign_on(victims_of(warnings=warnings), rows, 1, attacks=attacks, workers=two).attack(subject, [DEFENDED])
    assert warnings == [f"not attacked: {name}: {given_up(two)}"]
    assert [row["image_id"] for row in lines(tmp_path / "deadly.jsonl")[::2]] == [n for n in norms if n != name]


@dataclass(frozen=True, kw_only=True)
class Poisoned(Attack):
    """Kills its process on client 1's update."""

    def misfit(self, observations: Sequence[Observation]) -> str:
        return ""

    def reconstruct(self, observations: Sequence[Observation]) -> Reconstruction:
        if observations[0].client == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ATTACKS.get("patch_embedding")()(observations)


@pytest.fixture
def poisoned():
    """The attack under a name."""
    ATTACKS.register("poisoned")(Poisoned)
    yield "poisoned"
    for table in (ATTACKS._sources, ATTACKS._entries):
        del table["poisoned"]


def simulated(out: Path, *options: str, code: int = 0) -> list[dict]:
    """Rows of a federation of three clients."""
    given = ["--model", "vit_micro_32", "--weights", "random", "--clients", "3", "--rounds", "1", "--test-limit", "4"]
    assert simulate.main([*given, "--threads", "1", "--out", str(out), *options]) == code
    return lines(out / "rows.jsonl")


def test_the_updates_of_a_run_are_attacked_side_by_side(tmp_path: Path, capsys, two, poisoned: str) -> None:
    attacks = ["--defense", "mjp", "--attacks", "patch_embedding", "mjp_subspace"]
    where = ["--workers", "2", *(["--ray", two.ray] if two.ray else [])]
    serial = simulated(tmp_path / "serial", *attacks)
    assert len(serial) == 3 * 4
    rows = simulated(tmp_path / "poisoned", *attacks, poisoned, *where, code=1)
    assert "lacks the attacks on 1 update, the first that of client 1 in round 1" in capsys.readouterr().err
    kept = [row | {"run_id": ""} for row in serial if row["client"] != 1]
    assert [row | {"run_id": ""} for row in rows if row["attack"] != poisoned] == kept
    assert [row["client"] for row in rows if row["attack"] == poisoned] == [0, 2]
    [lost] = json.loads((tmp_path / "poisoned" / "run.json").read_text())["not_attacked"]
    names = ["mean_image", "other_image", "patch_embedding", "mjp_subspace", poisoned]
    assert lost == {"defense": "mjp", "round": 1, "client": 1, "attacks": names, "reason": given_up(two)}
    assert f"client 1's update was not attacked by {', '.join(names)}" in unescape(
        (tmp_path / "poisoned" / "report.html").read_text()
    )


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


def test_ray_that_is_not_installed_is_named_with_its_extra(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert mjp_adaptive.main(["--out", str(tmp_path / "out"), "--ray", "auto"]) == 2
    assert (
        capsys.readouterr().err == "error: --ray auto needs Ray: pip install 'fedmjp[ray]', or use --workers NUMBER\n"
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_an_address_without_a_cluster_is_refused() -> None:
    importlib.import_module("ray").shutdown()  # another test's connection would be taken
    with pytest.raises(UsageError, match="--ray 127.0.0.1:1: nothing answers there"):
        next(in_order(range(2), abs, WorkerConfig(ray="127.0.0.1:1")))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_node_with_another_version_refuses_its_task() -> None:
    from fedmjp.workers.ray_tasks import _compute, code

    wanted = code() | {"torch": "1.0"}
    refused = _compute._function([None], b"", wanted, [])  # as on a node, without a cluster
    assert f"has torch {torch.__version__.partition('+')[0]}" in str(refused.error)
    assert "this machine has 1.0" in str(refused.error)


@pytest.mark.parametrize("option", [["--workers", "2"], ["--ray", "auto"]])
def test_clients_on_ray_leave_no_cores_to_workers(tmp_path, capsys, monkeypatch, option: list[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert simulate.main(["--engine", "ray", *option, "--out", str(tmp_path / "out")]) == 2
    assert "--engine ray gives the cores to clients" in capsys.readouterr().err


def test_what_was_given_up_in_rounds_that_run_again_is_forgotten() -> None:
    lines = [{"defense": name, "round": number} for name in ("none", "mjp") for number in (1, 2)]
    folder = SimpleNamespace(description={"not_attacked": lines})
    RunFolder.forget_not_attacked(folder, "mjp", 1)
    assert folder.description["not_attacked"] == lines[:3]
