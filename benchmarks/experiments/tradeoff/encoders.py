"""What a federation's encoder is worth, whatever its clients train: the accuracy of a linear probe.

An objective without labels has no accuracy over classes of its own. So the encoder is frozen, and a linear classifier
(`fedmjp.evaluation.linear_probe`) is fitted to the labelled training images, before the first round and after the last
one. Supervised federations in the same table are measured so, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from experiments.federations import read_measured, write_measured
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.evaluation.features import trained_pool
from fedmjp.evaluation.linear_probe import probe_accuracy
from fedmjp.records.run_folder import RunFolder

FILE = "encoder.csv"
IMAGES = 5_000  # training images that the probe is fitted to, at most


def measure_encoder(config: RunConfig, folder: RunFolder) -> None:
    """Write the probe's accuracy at the first and the last weights of a federation.

    Raises:
        UsageError: data or weights that are not there.
    """
    (name,), device = config.defense, torch.device(config.device)
    number, state, _ = folder.load_state(name)
    task = ClientTask(config, name)
    data = task.data.train
    some = data.subset(range(0, len(data), -(-len(data) // IMAGES)))
    images, pool, lines = replace(task.data, train=some), trained_pool(task.learner.objective), []
    for at in (0, number):
        if at:
            task.load(state.weights)
        accuracy = probe_accuracy(task.learner.model, images, device, pool)
        lines.append({"round": at, "loss": float("nan"), "accuracy": accuracy, "test_images": len(images.test)})
    write_measured(pd.DataFrame(lines), config.out / FILE)


def read_encoder(out: Path) -> pd.DataFrame | None:
    """round, loss (empty), accuracy and test_images of a federation's encoder; None where it was not measured.

    Raises:
        UsageError: the file is not as it was written.
    """
    return read_measured(out / FILE)
