"""Attacks on updates of every objective; the protocol stands in `options.Options`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Observation, ThreatModel
from experiments.objectives.options import LINES, Line, Options
from experiments.objectives.render import OBJECTIVES_LEAK
from experiments.session import TableRun
from fedmjp.audit.harness import Scored, audit_update
from fedmjp.audit.observe import observe_step
from fedmjp.audit.victims import Subject, Victims
from fedmjp.budgets import build_attack
from fedmjp.config import ModelConfig
from fedmjp.defenses import DEFENSES
from fedmjp.models.weights import classes_of
from fedmjp.objectives import Draws, Learner, read_objective
from fedmjp.records.rows import BASELINES, RowLog

CLASSES = 10  # of a random head


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering = "objectives_leak", OBJECTIVES_LEAK
    granted = ThreatModel()

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        return [self.attack_line(LINES[name], rows) for name in self.options.lines][-1]

    def attack_line(self, line: Line, rows: RowLog) -> str:
        """Write every row of one line that is missing; returns the images' provenance."""
        o, learner = self.options, self.learner(line)
        count = max(1, round(line.images * o.num_images))
        gallery = self.session.gallery(o.images, size=learner.model.image_size, limit=o.num_images, path=o.data_path)
        victims = self.session.victims(gallery, learner.defense, o.seed)
        with self.session.bar() as bar:
            task = bar.add_task(f"{line.objective}, {learner.model.provenance}", total=min(count, len(victims)))
            mean = victims.mean_image(1)
            for client in range(min(count, len(victims))):
                for row in self.rows_of(line, learner, victims, client, mean, rows):
                    rows.append({**self.session.columns, **row})
                bar.advance(task)
        return gallery.provenance

    def learner(self, line: Line) -> Learner:
        """The undefended client's model with the objective's heads."""
        weights = self.options.files().get(line.weights, line.weights)
        objective = read_objective(line.objective)
        return Learner.build(
            objective,
            DEFENSES.get("none")(),
            ModelConfig(line.model, weights),
            num_classes=classes_of(line.model, weights) or CLASSES,
            seed=self.options.seed,
            device=self.session.device,
        )

    def rows_of(
        self, line: Line, learner: Learner, victims: Victims, client: int, mean: Tensor, rows: RowLog
    ) -> Iterator[dict[str, Any]]:
        """The rows that are missing of one client."""
        _, originals = victims.decode([client])
        attacks = {name: build_attack(name, self.settings(name)) for name in line.attacks}
        for attack, name in ((a, n) for n, a in attacks.items()):
            attack.require(self.granted, name)
        named = dict.fromkeys(BASELINES, {}) | {name: attack.parameters() for name, attack in attacks.items()}
        count, score = learner.objective.whole_views, self.session.scorer(learner.model.patch_size)
        seen: list[Observation] = []
        for updates in line.updates:
            cases = {n: self.case(line, learner, victims, updates, n, own) for n, own in named.items()}
            missing = [n for n, case in cases.items() if not rows.done(case, victims.ids(client) * count)]
            if not missing:
                continue
            while len(seen) < updates:
                observation, fed = self.observe(learner, victims, client, originals, len(seen))
                seen.append(observation)
            targets = fed if count > 1 else originals
            others = victims.others([client], originals)
            guesses = (mean.expand_as(targets), others.expand_as(targets))
            found = audit_update(
                seen,
                targets,
                attacks=attacks,
                baselines=dict(zip(BASELINES, guesses, strict=True)),
                score_images=score,
                skip=lambda name, missing=missing: name not in missing,
                weights_granted=True,
            )
            yield from self.written(found, cases, victims, client, count, seen[-1].gradient_norm())

    def written(
        self, found: Iterator[Scored], cases: dict, victims: Victims, client: int, count: int, norm: float
    ) -> Iterator[dict[str, Any]]:
        """The rows of what was found, one for each view."""
        for scored in found:
            for place in range(count):
                yield scored.row(cases[scored.attack], victims.ids(client)[0], norm, place)

    def observe(
        self, learner: Learner, victims: Victims, client: int, originals: Tensor, number: int
    ) -> tuple[Observation, Tensor]:
        """The `number`-th update of a client, from 0, and what the model was fed."""
        key = zlib.crc32(f"{self.options.seed} {victims.ids(client)[0]} {number}".encode())
        labels = victims.labels(learner.model, [client]) if learner.objective.needs_labels else None
        observation, fed = observe_step(learner, originals, Draws.seeded(key, key + 1), labels, round=number + 1)
        return replace(observation, client=client), fed

    def settings(self, name: str) -> dict[str, Any]:
        """Settings of an attack: the steps of a search."""
        return {"steps": self.options.steps} if name == "position_head" and name in ATTACKS else {}

    def case(
        self, line: Line, learner: Learner, victims: Victims, updates: int, attack: str, parameters: dict
    ) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`); the round is the number of updates."""
        setting = "scored against the crops fed" if learner.objective.whole_views > 1 else "scored against the original"
        case = victims.case(Subject(learner.model, self.granted), "none", setting, attack, parameters, updates)
        own = {"objective": line.objective, "objective_parameters": dict(vars(learner.objective))}
        return case | own
