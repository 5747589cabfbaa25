"""Error under common corruptions: Tables 4 and 9 of the MJP paper.

What the paper calls mCE has no reference: for DeiT-S it is the plain mean of the ten errors in its Table 9, for its MJP
model it is less than that mean. So errors are also averaged plainly, over those ten and over all. ImageNet-A and -O,
the other half of Table 4, are photographs of their own that no package ships: not measured here. How the pictures are
made, and where that departs from ImageNet-C: `corrupted`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from experiments.session import Session
from experiments.trained_models import corrupted
from experiments.trained_models.checkpoints import load_bundle, load_trained
from experiments.trained_models.corruption_table import CORRUPTION, ROWS
from experiments.trained_models.options import CorruptionOptions
from fedmjp.models import BuiltModel
from fedmjp.records.rows import RowLog

BATCH = 100


def run(options: CorruptionOptions, console: Console) -> None:
    """Measure what is missing, then write tables and figure."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: CorruptionOptions, console: Console) -> None:
        package = corrupted.load_package()[1]
        self.options, self.console, self.session = options, console, Session(options, console, ROWS)
        self.subjects = options.subjects()
        self.bundle = load_bundle(options, self.subjects[options.reference])
        self.models = {
            name: [load_trained(options, subject.name, source, self.bundle) for source in subject.sources]
            for name, subject in self.subjects.items()
        }
        images = self.bundle.test
        self.shared = {
            "dataset": self.bundle.name,
            "subset": _digest("\n".join(images.ids).encode()),
            "images": len(images),
            "package": package,
            "size": self.models[options.reference][0].image_size,
            "seed": options.seed,
        }
        self.states = {name: [fingerprint(model) for model in models] for name, models in self.models.items()}

    def __call__(self) -> None:
        """Measure what is missing, then write tables and figure."""
        with self.session.rows() as log:
            self.measure(log)
        asked = {
            "case": self.shared,
            "states": self.states,
            "corruptions": list(self.options.corruptions),
            "severities": list(self.options.severities),
            "reference": self.options.reference,
        }
        self.session.finish("corruptions", CORRUPTION, images=self.bundle.provenance, asked=asked)
        summary = pd.read_csv(self.options.out / "summary.csv", keep_default_na=False).query("source == 'measured'")
        shown = summary.drop(columns=[c for c in summary if c.endswith(("_low", "_high"))])
        self.console.print(shown.to_string(index=False, float_format="%.2f"), highlight=False)

    def measure(self, log: RowLog) -> None:
        """Append every missing row."""
        cells, images = self.options.cells(), self.bundle.test
        with self.session.bar() as bar:
            task = bar.add_task("", total=len(cells) * len(images))
            for number, (corruption, severity) in enumerate(cells):
                missing = [found for found in self.cases(corruption, severity) if not log.has(found[1])]
                bar.update(task, description=f"{corruption} {severity or ''}", completed=number * len(images))
                wrong: list[list[Tensor]] = [[] for _ in missing]
                for pictures, labels in self.batches(corruption, severity) if missing else ():
                    for (model, _), answers in zip(missing, wrong, strict=True):
                        answers.append(mistakes(model, pictures.to(self.session.device), labels))
                    bar.advance(task, len(labels))
                for (model, case), answers in zip(missing, wrong, strict=True):
                    every = torch.cat(answers)
                    found = {"error": 100 * float(every.double().mean()), "wrong": "".join(map(str, every.tolist()))}
                    log.append({**self.session.columns, **case, "weights": model.provenance, **found})

    def cases(self, corruption: str, severity: int) -> Iterator[tuple[BuiltModel, dict[str, Any]]]:
        """(model, what identifies its row) under a corruption, training by training."""
        cell = {**self.shared, "corruption": corruption, "severity": severity}
        for name, models in self.models.items():
            for model, state in zip(models, self.states[name], strict=True):
                yield model, cell | {"model": name, "state": state}

    def batches(self, corruption: str, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(corrupted images, labels) in order."""
        images = self.bundle.test
        for start in range(0, len(images), BATCH):
            indices = range(start, min(start + BATCH, len(images)))
            ids = [images.ids[i] for i in indices]
            pictures = corrupted.corrupt(images.images(indices), ids, corruption, severity, self.options.seed)
            yield pictures, images.labels[start : start + BATCH]


@torch.no_grad()
def mistakes(model: BuiltModel, pictures: Tensor, labels: Tensor) -> Tensor:
    """(B,) uint8: 1 where the model's answer to images (B, C, H, W) in [0, 1] is wrong."""
    model.module.to(pictures.device).eval()
    return (model.module(model.normalise(pictures)).argmax(dim=1).cpu() != labels).byte()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:10]


def fingerprint(model: BuiltModel) -> str:
    """Ten hexadecimal digits of the SHA-256 of all weights."""
    return _digest(
        b"".join(v.detach().cpu().contiguous().numpy().tobytes() for v in model.module.state_dict().values())
    )
