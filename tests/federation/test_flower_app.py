"""The run that `flwr run` starts, on a grid in this process."""

from __future__ import annotations

import json

import pytest

from attacks import UsageError
from fedmjp.before_start import check_resumable
from fedmjp.client import ClientTask
from fedmjp.config import from_flat
from fedmjp.federation.client_app import app as client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.flower_app import _run
from fedmjp.records.rows import BASELINES, load_rows


def test_the_server_app_runs_with_flat_options_and_writes_the_report(tmp_path) -> None:
    out = tmp_path / "flower"
    options = {"model": "vit_mini_32", "weights": "random", "rounds": 1, "test_limit": 4, "budget": "1s"}
    _run(LocalGrid(client_app, 2), {**options, "defense": "none,mjp:gamma=0.3", "out": str(out)})
    assert (out / "report.html").exists()
    described = json.loads((out / "run.json").read_text())
    assert described["finished"]
    assert described["config"]["federation"]["clients"] == 2
    assert set(described["ran"]) == {"none", "mjp:gamma=0.3"}
    rows = load_rows(out / "rows.jsonl")  # nodes draw for themselves: nobody knows the originals
    assert rows["psnr"].isna().all()
    assert set(rows["image_id"]) == {"image 0"}
    assert not set(rows["attack"]) & set(BASELINES)
    assert rows.loc[rows["defense"] == "none", "certified"].any()
    assert "the originals are not known" in (out / "report.html").read_text()


def test_a_finished_run_asks_no_node_again(tmp_path) -> None:
    options = {"model": "vit_micro_32", "weights": "random", "rounds": 1, "test_limit": 2, "out": str(tmp_path)}
    options |= {"attacks": "patch_embedding"}
    _run(LocalGrid(client_app, 2), options)
    rows = (tmp_path / "rows.jsonl").read_bytes()

    class Silent(LocalGrid):
        def send_and_receive(self, messages, timeout=None):
            raise AssertionError("a node was asked")

    _run(Silent(client_app, 2), {**options, "resume": True})
    assert (tmp_path / "rows.jsonl").read_bytes() == rows
    assert json.loads((tmp_path / "run.json").read_text())["finished"]


def test_a_guarantee_does_not_outlast_an_interruption() -> None:
    """Nodes draw a new walk over their images, in which one comes again that was used before."""
    config = from_flat({"model": "vit_micro_32", "weights": "random", "clients": 2, "rounds": 3, "defense": "dp_sgd"})
    task = ClientTask(config, "dp_sgd")
    assert task.guarantee
    with pytest.raises(UsageError, match="anew from round 2 on, so that the epsilon of --defense dp_sgd"):
        check_resumable(task, "dp_sgd", 2, simulated=False)
    check_resumable(task, "dp_sgd", 2, simulated=True)


def test_what_only_clients_know_cannot_be_granted(tmp_path) -> None:
    for grant in ("labels", "client_seed"):
        with pytest.raises(UsageError, match=f"grants={grant} has no meaning here"):
            _run(LocalGrid(client_app, 2), {"grants": f"model_weights,{grant}", "out": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
