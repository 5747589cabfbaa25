"""Replies are streamed: peak memory does not grow with the number of clients."""

from __future__ import annotations

import subprocess
import sys

import pytest
from PIL import Image

from tests.conftest import photographs

SCRIPT = """
import resource, sys
from fedmjp.client import ClientTask
from fedmjp.config import from_flat
from fedmjp.federation import ENGINES, run_rounds
options = {"model": "vit_mini_64", "clients": 60, "rounds": 1, "threads": 1, "data": "folder:" + sys.argv[1]}
for clients in (1, 60):
    config = from_flat(options | {"clients_per_round": clients})
    ENGINES.get("local")(lambda grid: run_rounds(grid, ClientTask(config, "none"), "none", on_update=lambda v: None,
                                                 on_round=lambda n, state: None), 60,
                         config.client_entropy())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_clients(tmp_path) -> None:
    crops = [(crop * 255).byte().permute(1, 2, 0).numpy() for crop in photographs(64, 8)]
    for part, count in (("train", 60), ("val", 1)):
        (tmp_path / part / "crop").mkdir(parents=True)
        for i in range(count):
            Image.fromarray(crops[i % 8]).save(tmp_path / part / "crop" / f"{i}.png")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    one, sixty = (float(gib) for gib in done.stdout.split())
    assert sixty - one < 0.3, f"peak memory in GiB with 1 client {one}, with 60 {sixty}"
