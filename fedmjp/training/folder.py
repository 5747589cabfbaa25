"""The folder of a training: checkpoint, history, weights and model card. All its file names are defined here."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attacks import UsageError
from fedmjp.metrics.intervals import wilson
from fedmjp.records import provenance
from fedmjp.records.files import read_record, read_sealed, write_record, write_sealed, write_whole
from fedmjp.records.lock import FolderLock
from fedmjp.report.styles import NORMAL, SMALL, error_bars, save, style
from fedmjp.training.config import TrainConfig

DRAWN_EVERY = 30.0  # seconds; drawing takes half a second, and an epoch on a GPU may take two


class TrainingFolder:
    """The folder `config.out`, opened for a new training or to resume one.

    Args:
        config: all options of the training.
        guarantee: what the defence proves for it, in words.

    Raises:
        UsageError: the folder holds a training and `resume` is not set, or it holds one with other options, or another
            process writes to it.
    """

    def __init__(self, config: TrainConfig, guarantee: str = "") -> None:
        self.out = config.out
        self._identity, self._drawn = config.identity(), -DRAWN_EVERY
        described = self.out / "run.json"
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file; pass a folder")
        if described.exists():
            if not config.resume:
                raise UsageError(f"{self.out} holds a training already; pass --resume to finish it, or another --out")
            provenance.require_same(self.out, "training", read_record(described), self._identity)
        self.out.mkdir(parents=True, exist_ok=True)
        FolderLock(self.out)  # until the process ends
        record = {
            "config": self._identity,
            **({"guarantee": guarantee} if guarantee else {}),
            "commit": provenance.commit(),
            "versions": provenance.versions(),
            "device": provenance.device_name(torch.device(config.device)),
        }
        write_record(described, record)

    @property
    def weights(self) -> Path:
        """Path of the trained weights; the model card has the same path with the suffix .md."""
        return self.out / "model.safetensors"

    def save(self, state: dict[str, Any], history: list[dict[str, float]]) -> None:
        """Write checkpoint (behind a line with its digest), then the history; each file whole or not at all.

        The figure is drawn if the last one is `DRAWN_EVERY` old; `write_history` draws it in any case.

        Args:
            state: from `Trainer.state`.
            history: one record per epoch, from `Trainer.epoch`.
        """
        content = io.BytesIO()
        torch.save({"state": state, "history": history}, content)
        write_sealed(self.out / "state.pt", content.getvalue())
        self.write_history(history, draw=time.monotonic() >= self._drawn + DRAWN_EVERY)

    def write_history(self, history: list[dict[str, float]], draw: bool = True) -> None:
        """Write history.csv and, with `draw`, history.png; both follow from the checkpoint."""
        frame = pd.DataFrame(history)
        write_whole(self.out / "history.csv", frame.to_csv(index=False, float_format="%.6g").encode())
        if draw:
            history_figure({"": frame}, self.out / "history.png")
            self._drawn = time.monotonic()

    def load(self) -> tuple[dict[str, Any] | None, list[dict[str, float]]]:
        """(state, history) after the last finished epoch, or (None, []) if there is none.

        Raises:
            UsageError: the checkpoint cannot be read.
        """
        path = self.out / "state.pt"
        if not path.exists():
            return None, []
        content, _ = read_sealed(path, "start again in another --out")
        kept = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return kept["state"], kept["history"]


def history_figure(histories: dict[str, pd.DataFrame], path: Path) -> None:
    """Draw test accuracy (per cent) with its 95 % interval over test images, and training loss, by epoch.

    Args:
        histories: label -> columns `epoch`, `test_accuracy`, `test_images`, `train_loss` of one training each; an empty
            label gets no legend.
        path: the .png to write; a .pdf is written too.
    """
    figure = Figure(figsize=(6.6, 3.0), layout="constrained")
    panels = figure.subplots(1, 2)
    for index, (label, history) in enumerate(histories.items()):
        line_style = style(index) | {"ms": 3.5, "lw": 1.3}
        share = history["test_accuracy"].to_numpy(float)
        low, high = wilson(share, history["test_images"].to_numpy(float))
        table = pd.DataFrame({"mean": 100 * share, "low": 100 * low, "high": 100 * high})
        beside = 0.05 * (index - (len(histories) - 1) / 2)
        error_bars(panels[0], history["epoch"] + beside, table, label=label, **line_style)
        panels[1].plot(history["epoch"], history["train_loss"], **line_style)
    for axes, words in zip(panels, ("Test accuracy (%)", "Training loss"), strict=True):
        axes.set_xlabel("Epoch", fontsize=NORMAL)
        axes.set_ylabel(words, fontsize=NORMAL)
        axes.tick_params(labelsize=SMALL)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    images = ", ".join(f"{count:,}" for count in sorted({n for h in histories.values() for n in h["test_images"]}))
    words = f"One seed a model. Bars: 95 % interval over {images} test images; of the loss only the mean is recorded."
    if any(histories):
        look = {"ncols": 4, "fontsize": SMALL, "frameon": False, "title": words, "title_fontsize": SMALL}
        figure.legend(loc="outside lower center", **look)
    else:
        figure.supxlabel(words, fontsize=SMALL)
    save(figure, path)
