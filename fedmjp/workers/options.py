"""The options of commands whose tasks may be computed side by side. Imports neither torch nor Ray."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from attacks.registry import UsageError


@dataclass(frozen=True)
class WorkerConfig:
    """Where independent tasks are computed."""

    workers: int | None = None
    """Processes side by side, each with one thread (None: one; with --ray all CPUs of the cluster). Rows are those of
    one process with --threads 1, in the same order."""
    ray: str = ""
    """Compute on a Ray cluster at this address (auto, HOST:PORT, ray://HOST:PORT; local starts one on this machine);
    "" for processes of this machine. Needs pip install 'fedmjp[ray]'."""

    @property
    def spread(self) -> bool:
        """Whether tasks are computed elsewhere than in this process."""
        return bool(self.ray) or (self.workers or 1) > 1

    def together(self) -> int:
        """Tasks to gather before they are computed, where their number is not known and each takes memory."""
        return 2 * (self.workers or os.cpu_count() or 1) if self.spread else 1

    def check(self, device: str, threads: int) -> None:
        """Check the options against a command's others.

        Args:
            device: where the command computes, as --device takes it.
            threads: as --threads takes it; 0 for torch's own choice.

        Raises:
            UsageError: fewer than one worker, a device or threads that workers cannot share out, or no Ray.
        """
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if not self.spread:
            return
        option = "--ray" if self.ray else "--workers"
        if device != "cpu":
            raise UsageError(f"{option} shares out the cores of CPUs; leave it out with --device {device}")
        if threads > 1:
            raise UsageError(f"{option} gives each process one thread; leave out --threads")
        if self.ray and importlib.util.find_spec("ray") is None:
            raise UsageError(f"--ray {self.ray} needs Ray: pip install 'fedmjp[ray]', or use --workers NUMBER")


HERE = WorkerConfig()  # this process alone
