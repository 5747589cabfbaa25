"""python -m fedmjp.probe: a pre-trained encoder measured by k nearest neighbours, a linear probe and its pretext task.

What computes is imported after the options are read and checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attacks.registry import UsageError
from fedmjp.cli import guarded, parse, terminal
from fedmjp.config import DataConfig
from fedmjp.data.catalog import IMAGES, SPEECH, require_kind, split_source


@dataclass(frozen=True)
class ProbeConfig:
    """Measure the encoder in a model.safetensors of fedmjp.train, without training it further."""

    checkpoint: Path | None = None
    """The file; model and objective are read from it."""
    data: DataConfig = field(default_factory=lambda: DataConfig(test_limit=None))
    neighbours: tuple[int, ...] = (10, 20)
    """Numbers of nearest training images that vote."""
    pool: Literal["auto", "class", "mean"] = "auto"
    """Features: the class token, the mean of the patches, or auto (the class token where it was trained)."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    seed: int = 0
    """Fixes the subset of images, and what the pretext task shows."""

    def validate(self) -> None:
        """Check the options.

        Raises:
            UsageError: one line that names the option.
        """
        if self.checkpoint is None or not self.checkpoint.is_file():
            raise UsageError(f"no checkpoint at {self.checkpoint}; pass --checkpoint MODEL.safetensors of fedmjp.train")
        split_source(self.data.data)
        if any(k < 1 for k in self.neighbours):
            raise UsageError(f"--neighbours takes numbers of at least 1, not {min(self.neighbours)}")


def probe(config: ProbeConfig) -> dict[str, float]:
    """Name of each measure -> accuracy in [0, 1].

    Raises:
        UsageError: checkpoint, data or device that cannot be used.
    """
    from fedmjp.client import shared_data
    from fedmjp.devices import usable_device, use_threads
    from fedmjp.evaluation.features import trained_pool
    from fedmjp.evaluation.linear_probe import probe_accuracy
    from fedmjp.evaluation.neighbours import neighbour_accuracy
    from fedmjp.evaluation.positions import position_accuracy
    from fedmjp.models import MODELS, split_name
    from fedmjp.objectives.learner import require_origin, restore
    from fedmjp.objectives.position_prediction import PositionPrediction

    device, origin = usable_device(config.device), require_origin(config.checkpoint)
    use_threads(0)
    spec = MODELS.get(split_name(origin.model)[0])
    require_kind(config.data.data, SPEECH if spec.speech else IMAGES, f"the encoder of a {origin.model}")
    data = shared_data(config.data, spec.image_size, config.seed)
    data.require_labels("fedmjp.probe")
    learner = restore(config.checkpoint, device)
    predicts = isinstance(learner.objective, PositionPrediction)
    pool = config.pool if config.pool != "auto" else trained_pool(learner.objective)
    found = {
        f"{k} nearest neighbours": accuracy
        for k, accuracy in neighbour_accuracy(learner.model, data, device, config.neighbours, pool).items()
    }
    found["linear probe"] = probe_accuracy(learner.model, data, device, pool)
    if predicts:
        accuracy = position_accuracy(learner.objective, learner.model, data.test, device, config.seed)[1]
        found["places of patches"] = accuracy
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    config = parse(ProbeConfig, "python -m fedmjp.probe", ProbeConfig.__doc__, arguments)
    console = terminal()

    def work() -> None:
        """The measurements, a line each."""
        config.validate()
        for name, accuracy in probe(config).items():
            console.print(f"{name}: {accuracy:.2%}", highlight=False)

    return guarded(work, lambda: "nothing is written")


if __name__ == "__main__":
    sys.exit(main())
