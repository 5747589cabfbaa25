"""The run that `flwr run` starts, on a grid in this process."""

from __future__ import annotations

import json

from fedmjp.federation.client_app import app as client_app
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.flower_app import _run


def test_the_server_app_runs_with_flat_options_and_writes_the_report(tmp_path) -> None:
    out = tmp_path / "flower"
    options = {"model": "vit_mini_32", "weights": "random", "rounds": 1, "test_limit": 4, "budget": "1s"}
    _run(LocalGrid(client_app, 2), {**options, "defense": "none,mjp:gamma=0.3", "out": str(out)})
    assert (out / "report.html").exists()
    described = json.loads((out / "run.json").read_text())
    assert described["finished"]
    assert described["config"]["federation"]["clients"] == 2
    assert set(described["ran"]) == {"none", "mjp:gamma=0.3"}
