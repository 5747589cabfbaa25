"""Independent tasks side by side, in processes of this machine or on a Ray cluster, with their results in order.

`in_order` is the one mechanism; where tasks are computed is an `Executor`: `fedmjp.workers.processes` or
`fedmjp.workers.ray_tasks`. A campaign of attacks hands in its batches of victims, and writes the rows that come back.
"""

from __future__ import annotations

from fedmjp.workers.options import HERE, WorkerConfig
from fedmjp.workers.schedule import ATTEMPTS, Lost, in_order

__all__ = ["ATTEMPTS", "HERE", "Lost", "WorkerConfig", "in_order"]
