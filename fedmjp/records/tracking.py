"""Numbers of a run for TensorBoard while it goes on, beside its own files: `--log tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedmjp.errors import needs_extra

FOLDER = "tensorboard"


class Tracker:
    """Scalars by round; this one keeps none."""

    def scalars(self, values: Mapping[str, float], number: int) -> None:
        """Record `values` by name at round `number`."""

    def close(self) -> None:
        """Write what is held back."""


class TensorBoardTracker(Tracker):
    """Writes event files into `folder`; a run that is resumed adds a file.

    Raises:
        UsageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        with needs_extra("tensorboard", "--log tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder))

    def scalars(self, values: Mapping[str, float], number: int) -> None:
        """Record `values` by name at round `number`, readable at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_tracker(log: str, out: Path) -> Tracker:
    """The tracker that `--log` names, for a run in `out`.

    Raises:
        UsageError: its package is not installed.
    """
    return TensorBoardTracker(out / FOLDER) if log == "tensorboard" else Tracker()
