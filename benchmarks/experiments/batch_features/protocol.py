"""The features that a batch's classifier gradient gives away; the protocol stands in `options.Options`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from attacks.classifier import find_classifier
from attacks.features.classifier_features import classifier_features
from attacks.features.feature_decoder import encoder
from attacks.features.noise_images import noise_batches
from attacks.observation import Observation
from attacks.registry import UsageError
from experiments.batch_features.options import Options
from experiments.batch_features.render import BATCH_FEATURES, SCHEMA
from experiments.session import Session, TableRun
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Victims
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog

LABELS = ("granted", "inferred")
# Error of a feature, in its own length, below which it counts as found; images in a forward pass.
FOUND, TOGETHER = 1e-3, 32


def run(options: Options, console: Console) -> None:
    """Solve, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering = "batch_features", BATCH_FEATURES
    _others: Tensor | None = None

    def start(self, options: Options, console: Console) -> Session:
        """See `TableRun.start`: rows of features."""
        return Session(options, console, SCHEMA)

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`: every size of batch in turn, from the first images of the gallery on.

        Raises:
            UsageError: there are too few images for the batches of a size.
        """
        o = self.options
        classes = classes_of(o.model, o.weights) or IMAGENET_CLASSES
        built = build_model(o.model, num_classes=classes, weights=o.weights, seed=o.seed, image_size=o.image_size)
        built.module.to(self.session.device).eval()
        needed = o.batches * max(o.batch_sizes)
        gallery = self.session.gallery(o.images, size=built.image_size, limit=needed, path=o.data_path)
        if len(gallery.images) < needed:
            raise UsageError(
                f"--images {o.images} has {len(gallery.images)} pictures, and {o.batches} batches of "
                f"{max(o.batch_sizes)} need {needed}; lower --batches or --batch-sizes"
            )
        case = {
            "dataset": gallery.name,
            "model": built.sized_name,
            "weights": built.provenance,
            "seed": o.seed,
            "classes": classes,
        }
        with self.session.bar() as bar:
            for size in o.batch_sizes:
                victims = Victims(
                    gallery,
                    DEFENSES.get("none")(),
                    seed=o.seed,
                    device=self.session.device,
                    warn=self.session.say,
                    group=size,
                )
                task = bar.add_task(f"{built.name}, batches of {size}", total=o.batches)
                for number in range(o.batches):
                    own = case | {"batch_size": size, "batch": number}
                    missing = [how for how in LABELS if not rows.has(own | {"labels": how})]
                    for answer in self.answers(built, victims, number, missing):
                        rows.append({**self.session.columns, **own, **answer})
                    bar.advance(task)
        return gallery.provenance

    def answers(
        self, built: BuiltModel, victims: Victims, number: int, labels: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """What is found of one batch, with labels granted or inferred."""
        clients, originals = victims.decode([number] if labels else [])
        if not clients:
            return
        view, truth = self.update(built, victims, number, originals)
        others = self.others(view)
        drawn = {
            "channels": truth.shape[1],
            "image_ids": " ".join(victims.ids(number)),
            "repeated": victims.group - len(view.labels.unique()),
        }
        for how in labels:
            given = view if how == "granted" else replace(view, labels=None)
            yield drawn | {"labels": how} | solved(given, others, truth)

    def update(self, built: BuiltModel, victims: Victims, number: int, originals: Tensor) -> tuple[Observation, Tensor]:
        """The classifier's gradient of a batch with labels drawn at random, and the features behind it (B, D)."""
        size = victims.group
        generator = torch.Generator().manual_seed(10**6 * self.options.seed + 10**3 * size + number)
        labels = torch.randint(built.module.num_classes, (size,), generator=generator).to(originals.device)
        view = observe_groups(built, ClientInput(originals), labels, size)[0]
        layer = find_classifier(view)
        sent = {name: g for name, g in view.gradients.items() if name.startswith(f"{layer}.")}
        with torch.no_grad():
            truth = torch.cat([encoder(view)(some) for some in originals.split(TOGETHER)])
        return replace(view, gradients=sent, labels=labels), truth

    def others(self, view: Observation) -> Tensor:
        """(n, D), features of noise; computed once."""
        if self._others is None:
            o, encode = self.options, encoder(view)
            noise = noise_batches(o.examples, TOGETHER, view.image_shape, o.seed)
            with torch.no_grad():
                self._others = torch.cat([encode(images) for images in noise])
        return self._others


def solved(view: Observation, others: Tensor, truth: Tensor) -> dict[str, Any]:
    """What the search finds of features (B, D), each compared with the nearest that was found."""
    started = time.process_time()
    try:
        with torch.no_grad():
            found = classifier_features(view, others)
    except UsageError as reason:
        seconds = time.process_time() - started
        return {"found": 0, "feature_error": None, "searches": 0, "seconds": seconds, "obstacle": str(reason)}
    seconds = time.process_time() - started
    errors = torch.cdist(truth, found.values).min(dim=1).values / truth.norm(dim=1)
    return {
        "found": int((errors < FOUND).sum()),
        "feature_error": float(errors.max()),
        "searches": found.starts,
        "seconds": seconds,
        "obstacle": "",
    }
