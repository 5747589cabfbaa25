"""Leakage under attacks that know the defence: against its strength, and against the number of updates.

Clients of one image each send one update after the other, the model drifting in between; after chosen numbers of
updates the server attacks with all it has received. What is compared: `options.Options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from rich.console import Console
from torch import Tensor

from attacks import Attack, Capability, Observation, ThreatModel
from experiments.adaptive.options import OTHER_UPDATES, UPDATES, Options
from experiments.adaptive.render import MASKS, RENDERINGS
from experiments.adaptive.table import round_by_round_figure
from experiments.adaptive.updates import Case, Found, Plan, Updates
from experiments.session import AttackSession
from fedmjp.audit.victims import Subject, Victims
from fedmjp.budgets import ALL, AUTO, build_attack
from fedmjp.data import Gallery, load_gallery
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog
from fedmjp.report.pictures import Panel, Reconstructed, reconstructions_figure
from fedmjp.workers import Lost, in_order

NAIVE = "april"
SAMPLED = 8  # clients by whose updates attacks are chosen
PICTURED, PICTURED_GAMMA, PICTURED_UPDATES = 3, 0.5, (1, 2, 4, 6, 8, 12, 16)
PICTURED_ATTACK = "mjp_rounds"


def cases(options: Options) -> Iterator[Case]:
    """Both experiments; where they agree in a strength, its first update is shared."""
    first, second = options.defenses(options.gammas), options.defenses(options.update_gammas)
    schedules = options.schedules if options.has("jigsaw_probability") else ("paper",)
    naive = bool({NAIVE, AUTO, ALL} & set(options.attacks))
    for defense in dict.fromkeys((*first, *second)):
        asked = options.attacks if defense in first else ()
        single = tuple(name for name in asked if name != NAIVE)
        usual = UPDATES.get(getattr(defense, "gamma", None), OTHER_UPDATES)
        counts = (options.updates or usual) if defense in second else ()
        if asked and naive:
            yield Case(defense, "paper", (NAIVE,), block="april")
        if single or "paper" in schedules and counts:
            yield Case(defense, "paper", single, counts if "paper" in schedules else ())
        if "released" in schedules and counts:
            yield Case(replace(defense, jigsaw_probability=0.5), "released", counts=counts)


def run(options: Options, console: Console) -> None:
    """Attack, then write tables and figures."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console, self.session = options, console, AttackSession(options, console)
        blocks = dict.fromkeys(["standard", *(case.block for case in cases(options))])
        self.subjects = {block: self.subject(block) for block in blocks}
        sent = self.subjects["standard"].built
        score = self.session.scorer(sent.patch_size)
        self.updates = Updates(options, self.subjects, score, self.session.columns)
        self.gallery = self.session.gallery(options.images, size=sent.image_size, limit=options.num_images)

    def subject(self, block: str) -> Subject:
        """The model that clients are sent in their first update; its block may be of the server's choosing."""
        o = self.options
        defense = o.chosen_defense()
        name, dal = defense.model_name(o.model), getattr(defense, "dal", "none")
        classes = classes_of(name, o.weights) or IMAGENET_CLASSES
        built = build_model(
            name, num_classes=classes, weights=o.weights, block=block, dal=dal, seed=o.seed, image_size=o.image_size
        )
        built.module.to(self.session.device).eval()
        extra = {Capability.MODIFIED_MODEL} if block == "april" else set()
        return Subject(built, ThreatModel(ThreatModel.parse(self.options.grants).grants | extra))

    def __call__(self) -> None:
        """Attack, then write tables and figures."""
        with self.session.rows() as rows:
            self.attack(rows)
        out = self.options.out
        choices = self.options.mask_choices
        if not choices and any(case.counts for case in cases(self.options)):
            round_by_round_figure(self.pictures(), out / "round_by_round.png")
        if self.options.pictured_gamma is not None:
            reconstructions_figure(self.panels(self.options.pictured_gamma), out / "one_update.png")
        self.session.finish("mjp_adaptive", MASKS if choices else RENDERINGS[0], images=self.gallery.provenance)
        for file in (out / name for name in ("one_update.csv", "updates.csv", "table.csv")):
            if file.exists():
                self.console.print(pd.read_csv(file).to_string(index=False), highlight=False)
        self.session.require_all()

    def attack(self, rows: RowLog) -> None:
        """Write every row that is missing."""
        with self.session.bar() as bar:
            for case in cases(self.options):
                victims = self.session.victims(self.gallery, case.defense, self.options.seed)
                plan = self.plan(case, victims)
                lines = [
                    self.updates.case(victims, case, count, name, attack)
                    for count, attacks in plan.items()
                    for name, attack in attacks.items()
                ]
                batches = [b for b in victims.batches(self.options.batch_size) if _lacking(rows, lines, victims, b)]
                updates, spread = max(plan, default=0), self.options.spread
                task = bar.add_task(case.title, total=len(batches) * updates)
                # Another process must leave the bar alone: its thread and its lock are this one's.
                advance = no_display if spread else partial(bar.advance, task)
                work = partial(self.updates.rows_of, case, plan, victims.with_warnings(print), advance)
                for batch, found in in_order(batches, work, self.options.worker_config()):
                    self.write(rows, batch, found)
                    bar.advance(task, updates if spread else 0)
                bar.remove_task(task)
                self.console.print(f"{case.title}: done", highlight=False)

    def write(self, rows: RowLog, batch: Sequence[int], found: Found | Lost) -> None:
        """Write the rows of a batch of clients that are missing, and what there is to say of it."""
        if isinstance(found, Lost):
            for line in found.lines(self.gallery.images.ids[client] for client in batch):
                self.session.say(line)
            return
        for line in found.warnings:
            self.session.say(line)
        for line, image_id, row in found.rows:
            if not rows.done(line, [image_id]):
                rows.append(row)

    def plan(self, case: Case, victims: Victims) -> Plan:
        """Number of updates -> the attacks that follow, by name, chosen for all clients of a case alike.

        A suite is chosen by the updates of `SAMPLED` clients: under the schedule of the released code the last update
        of a client may not be masked at all.
        """
        threat = self.subjects[case.block].threat_model
        plan: Plan = {count: {} for count in sorted({*case.counts, *((1,) if case.once else ())})}
        asked = (*case.once, *(self.options.update_attacks if case.counts else ()))
        if AUTO not in asked:
            return {count: self.chosen(case, count, [], threat) for count in plan}
        for number, histories, _ in self.updates.sent(case, victims, range(min(SAMPLED, len(victims)))):
            for history in histories if number in plan else ():
                plan[number] |= self.chosen(case, number, history, threat)
        return plan

    def chosen(self, case: Case, number: int, history: Sequence[Observation], threat: ThreatModel) -> dict[str, Attack]:
        """The attacks of one client's updates so far."""
        found: dict[str, Attack] = {}
        if number == 1 and case.once:
            suite = self.session.suite(case.once, history, threat)
            found |= {name: a for name, a in suite.items() if name != NAIVE or case.block == "april"}
        if number in case.counts:
            asked = self.options.update_attacks
            suite = self.session.suite(asked, history, threat)
            found |= {n: a for n, a in suite.items() if n in asked or Capability.SEVERAL_ROUNDS in a.needs}
        return found

    def panels(self, gamma: float) -> list[Panel]:
        """Embedded photographs at a masking ratio, and what each attack of the first experiment makes of one update."""
        gallery = self.embedded()
        defense = self.options.sweep([gamma])[0]
        case = Case(defense, "paper", tuple(name for name in self.options.attacks if name != NAIVE))
        victims = self.session.victims(gallery, defense, self.options.seed)
        found: dict[int, Panel] = {}
        answers = self.updates.follow(case, self.plan(case, victims), victims, range(len(victims)), no_display)
        for _, client, name, one, _, fed in answers:
            title = gallery.images.ids[client].split("/")[0]
            panel = found.setdefault(client, Panel(title, gallery.images.images([client])[0], fed))
            image = None if one.images is None else one.images[0]
            panel.reconstructions[name] = Reconstructed(image, one.records[0]["psnr"], one.diagnosis)
        return list(found.values())

    def embedded(self) -> Gallery:
        """The photographs of pictures."""
        return load_gallery("photos", size=self.subjects["standard"].built.image_size, limit=PICTURED)

    def pictures(self) -> dict[str, tuple[Tensor, dict[int, Tensor]]]:
        """Embedded photographs, and what the first attack of the second experiment finds after 1, 2, ... updates.

        `PICTURED_ATTACK` where none is asked for by name. A defence with the option gamma is drawn at gamma 0.5.
        """
        gallery, defense = self.embedded(), self.options.sweep([PICTURED_GAMMA])[0]
        case = Case(defense, "paper", counts=PICTURED_UPDATES)
        victims = self.session.victims(gallery, defense, self.options.seed)
        name = next((n for n in self.options.update_attacks if n not in (AUTO, ALL)), PICTURED_ATTACK)
        attack = build_attack(name, self.options.attack_settings().get(name))
        plan = {count: {name: attack} for count in PICTURED_UPDATES}
        found: dict[str, tuple[Tensor, dict[int, Tensor]]] = {}
        for number, client, _, one, _, _ in self.updates.follow(case, plan, victims, range(len(victims)), no_display):
            name = gallery.images.ids[client].split("/")[0]
            found.setdefault(name, (gallery.images.images([client])[0], {}))[1][number] = (
                None if one.images is None else one.images[0].cpu()
            )
        return found


def no_display() -> None:
    """Progress where there is nothing to show it on."""


def _lacking(rows: RowLog, lines: Sequence[dict[str, Any]], victims: Victims, batch: Sequence[int]) -> bool:
    """Whether a row of these lines is missing for one of the clients."""
    return not all(rows.done(line, victims.ids(client)) for line in lines for client in batch)
