"""Replies are streamed: many clients need hardly more memory than one."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from fedmjp.client import ClientTask
from fedmjp.config import from_flat
from fedmjp.federation import ENGINES, run_rounds
torch.set_num_threads(2)
config = from_flat({"model": "deit_ti", "clients": 100, "clients_per_round": int(sys.argv[1]), "rounds": 1,
                    "data": "photos", "partition": "iid", "train_limit": 96})
config = from_flat({"clients": 96, "clients_per_round": int(sys.argv[1])}, config)
ENGINES.get("local")(lambda grid: run_rounds(grid, ClientTask(config, "none"), "none", on_update=lambda v: None,
                                             on_round=lambda n, s: None), 96)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_clients() -> None:
    peak = {
        clients: float(subprocess.run([sys.executable, "-c", SCRIPT, str(clients)], capture_output=True, text=True, check=True).stdout)
        for clients in (1, 96)
    }
    assert peak[96] - peak[1] < 0.5, f"peak memory in GiB by clients: {peak}"
