"""Closed forms on clients that train locally; the protocol stands in `options.Options`."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from attacks import Observation
from experiments.local_training.clients import Client, Situation, situations
from experiments.local_training.options import Options
from experiments.local_training.render import LOCAL_TRAINING
from experiments.session import TableRun
from fedmjp.audit.harness import Scored, run_attack
from fedmjp.audit.victims import Subject, Victims
from fedmjp.budgets import build_attack
from fedmjp.defenses import DEFENSES
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog

SIZE = 4  # images that a client's updates hold


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering = "local_training", LOCAL_TRAINING

    def __init__(self, options: Options, console: Console) -> None:
        super().__init__(options, console)
        self.situations = [one for one in situations() if one.attack in options.attacks]
        self.plain = self.build(options.model, options.weights)
        self.gallery = self.session.gallery(
            options.images, size=self.plain.image_size, limit=options.num_images, path=options.data_path
        )
        masked = any(one.masked for one in self.situations)
        self.masked = self.build(f"{options.model}_mjp", "auto") if masked else None

    def build(self, name: str, source: str) -> BuiltModel:
        """A model at the size asked for."""
        o = self.options
        classes = classes_of(name, source) or IMAGENET_CLASSES
        built = build_model(name, num_classes=classes, weights=source, seed=o.seed, image_size=o.image_size or None)
        built.module.to(self.session.device).eval()
        return built

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        victims = self.session.victims(self.gallery, DEFENSES.get("none")(), self.options.seed)
        mean = victims.mean_image(1)
        with self.session.bar() as bar:
            task = bar.add_task(f"{self.plain.name}, {self.plain.provenance}", total=len(victims))
            for client in range(len(victims)):
                self.attack_client(victims, client, mean, rows)
                bar.advance(task)
        return self.gallery.provenance

    def attack_client(self, victims: Victims, client: int, mean: torch.Tensor, rows: RowLog) -> None:
        """Write every row of one image that is missing."""
        o = self.options
        members, images = victims.decode([(client + k) % len(victims) for k in range(SIZE)])
        if len(members) < SIZE or members[0] != client:
            return
        own = Client(self.plain, self.masked, images, victims.labels(self.plain, members), o.drift, o.seed)
        ids, score, original = victims.ids(client), self.session.scorer(self.plain.patch_size), images[:1]
        for name, guess in zip(BASELINES, (mean, victims.others([client], original)), strict=True):
            case = victims.case(Subject(self.plain), "none", "no message", name, {})
            if not rows.done(case, ids):
                scored = Scored(name, {}, None, score(guess, original), 0.0, "")
                rows.append({**self.session.columns, **scored.row(case, ids[0], float("nan"))})
        for situation in self.situations:
            attack = build_attack(situation.attack)
            case = self.case(victims, situation, attack.parameters())
            if rows.done(case, ids):
                continue
            sent: list[Observation] = situation.send(own)
            with torch.no_grad():
                scored = run_attack(attack, situation.attack, sent, original, score, weights_granted=True)
            rows.append({**self.session.columns, **scored.row(case, ids[0], sent[-1].gradient_norm())})

    def case(self, victims: Victims, situation: Situation, parameters: dict[str, Any]) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`); the setting is the situation."""
        subject = Subject(self.masked if situation.masked else self.plain)
        case = victims.case(
            subject, "mjp" if situation.masked else "none", situation.name, situation.attack, parameters
        )
        update = "gradient" if situation.masked else "weights"
        return case | {"model": subject.built.sized_name, "update": update}
