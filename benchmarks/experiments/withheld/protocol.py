"""Attacks of the suite on updates that lack one group of parameters; the protocol stands in `options.Options`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

from attacks import ThreatModel
from experiments.session import TableRun
from experiments.withheld.groups import without
from experiments.withheld.options import Options
from experiments.withheld.render import WITHHELD
from fedmjp.audit.harness import Scored, run_attack
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Setting, Subject, Victims
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog

PLAIN = Setting("plain", defended=False, hidden=False, against="original")


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering = "withheld", WITHHELD
    granted = ThreatModel()

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        return [self.attack_model(*line, rows) for line in self.options.lines()][0]

    def attack_model(self, model: str, source: str, pixels: int | None, rows: RowLog) -> str:
        """Write every row of one model that is missing; returns the images' provenance."""
        o = self.options
        classes = classes_of(model, source) or IMAGENET_CLASSES
        built = build_model(model, num_classes=classes, weights=source, seed=o.seed, image_size=pixels)
        built.module.to(self.session.device).eval()
        subject = Subject(built, self.granted)
        gallery = self.session.gallery(o.images, size=built.image_size, limit=o.num_images, path=o.data_path)
        victims, groups = self.session.victims(gallery, DEFENSES.get("none")(), o.seed), o.withheld()
        with self.session.bar() as bar:
            task = bar.add_task(f"{built.name}, {built.provenance}", total=len(victims) * len(groups))
            mean = victims.mean_image(1)
            for client in range(len(victims)):
                for case, one, norm in self.scored(subject, victims, client, mean, rows):
                    rows.append({**self.session.columns, **one.row(case, victims.ids(client)[0], norm, 0)})
                bar.advance(task, len(groups))
        return gallery.provenance

    def scored(
        self, subject: Subject, victims: Victims, client: int, mean: torch.Tensor, rows: RowLog
    ) -> Iterator[tuple[dict[str, Any], Scored, float]]:
        """What is missing of one client: the case, the scored answer and the gradient's norm."""
        ids = victims.ids(client)
        clients, originals = victims.decode([client])
        if not clients:
            return
        score = self.session.scorer(subject.built.patch_size)
        seen = victims.seen(subject.built, PLAIN, clients, originals)
        view = observe_groups(subject.built, seen, victims.labels(subject.built, clients), 1)[0]
        guesses = dict(zip(BASELINES, (mean.expand_as(originals), victims.others(clients, originals)), strict=True))
        records: dict[str, list[dict[str, float]]] = {}  # of the baselines, which are the same whatever is withheld
        for group in self.options.withheld():
            for name, guess in guesses.items():
                case = self.case(subject, victims, group, name, {})
                if not rows.done(case, ids):
                    if name not in records:
                        records[name] = score(guess, originals)
                    yield case, Scored(name, {}, None, records[name], 0.0, ""), float("nan")
            left = without(view, group)
            for name, attack in self.session.suite(self.options.attacks, [left], self.granted).items():
                case = self.case(subject, victims, group, name, attack.parameters())
                if not rows.done(case, ids):
                    found = run_attack(attack, name, [left], originals, score, weights_granted=True)
                    yield case, found, left.gradient_norm()

    def case(self, subject: Subject, victims: Victims, group: str, attack: str, parameters: dict) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`); the setting is the group that is withheld."""
        case = victims.case(subject, "none", f"without {group}", attack, parameters)
        return case | {"model": subject.built.sized_name}
