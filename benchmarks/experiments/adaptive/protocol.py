"""Leakage under attacks that know the defence: against its strength, and against the number of updates.

Clients of one image each send one update after the other, the model drifting in between; after chosen numbers of
updates the server attacks with all it has received. What is compared: `options.Options`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from attacks import Attack, Capability, Observation, ThreatModel
from attacks.memory import remember
from experiments.adaptive.options import OTHER_UPDATES, UPDATES, Options
from experiments.adaptive.render import MASKS, RENDERINGS
from experiments.adaptive.table import round_by_round_figure
from experiments.session import AttackSession
from fedmjp.audit.harness import Scored, score_found
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.budgets import ALL, AUTO, build_attack
from fedmjp.data import load_gallery
from fedmjp.defenses import Defense
from fedmjp.metrics.pixel import LEAST_MSE
from fedmjp.models import build_model, resize_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog
from fedmjp.workers import Lost, in_order

MASKED = Setting("masked", defended=True, hidden=True, against="original")
NAIVE = "april"
SAMPLED = 8  # clients by whose updates attacks are chosen
PICTURED, PICTURED_GAMMA, PICTURED_UPDATES = 3, 0.5, (1, 2, 4, 6, 8, 12, 16)
PICTURED_ATTACK = "mjp_rounds"


Plan = dict[int, dict[str, Attack]]  # number of updates -> the attacks that follow, by name


@dataclass(frozen=True)
class Case:
    """One curve's clients.

    Attributes:
        defense: of the clients.
        schedule: "paper", or "released" where half the steps are not jigsawed.
        once: what `--attacks` asks for, after the first update.
        counts: numbers of updates after which the attacks of `--update-attacks` follow.
        block: the model's first block.
    """

    defense: Defense
    schedule: str
    once: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    block: str = "standard"

    @property
    def title(self) -> str:
        """For a line of progress."""
        gamma = f"gamma {self.defense.gamma}, " if hasattr(self.defense, "gamma") else ""
        choice = getattr(self.defense, "mask_choice", "block")
        masks = f"{choice} masks, " if choice != "block" else ""
        return f"{gamma}{masks}{self.schedule} schedule"

    @property
    def updates(self) -> int:
        """How many updates the clients send."""
        return max((1, *self.counts))


@dataclass(frozen=True)
class Sent:
    """What clients of one image each sent their last update of.

    Attributes:
        clients: their numbers.
        originals: (clients, C, H, W) in [0, 1].
        masks: (clients, N) bool, the patches without their position.
        patch_size: side of a patch in pixels.
    """

    clients: list[int]
    originals: Tensor
    masks: Tensor
    patch_size: int


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
        self.score = self.session.scorer(sent.patch_size)
        self.gallery = load_gallery(options.images, size=sent.image_size, limit=options.num_images)

    def subject(self, block: str) -> Subject:
        """The model that clients are sent in their first update; its block may be of the server's choosing."""
        o = self.options
        defense = o.chosen_defense()
        name, dal = defense.model_name(o.model), getattr(defense, "dal", "none")
        classes = classes_of(name, o.weights) or IMAGENET_CLASSES
        built = build_model(name, num_classes=classes, weights=o.weights, block=block, dal=dal, seed=o.seed)
        if o.image_size is not None:
            built = resize_model(built, o.image_size)
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
        self.session.finish("mjp_adaptive", MASKS if choices else RENDERINGS[0], images=self.gallery.provenance)
        for file in (out / name for name in ("one_update.csv", "updates.csv", "table.csv")):
            if file.exists():
                self.console.print(pd.read_csv(file).to_string(index=False), highlight=False)

    def attack(self, rows: RowLog) -> None:
        """Write every row that is missing."""
        with self.session.bar() as bar:
            for case in cases(self.options):
                victims = self.session.victims(self.gallery, case.defense, self.options.seed)
                plan = self.plan(case, victims)
                lines = [
                    self.case(victims, case, count, name, attack)
                    for count, attacks in plan.items()
                    for name, attack in attacks.items()
                ]
                batches = [b for b in victims.batches(self.options.batch_size) if _lacking(rows, lines, victims, b)]
                updates, workers = max(plan, default=0), self.options.workers
                task = bar.add_task(case.title, total=len(batches) * updates)
                # A worker must leave the bar alone: its thread and its lock are the parent's.
                advance = partial(bar.advance, task) if workers == 1 else lambda: None
                work = partial(self.rows_of, case, plan, victims, advance)
                for batch, found in in_order(batches, work, workers):
                    if isinstance(found, Lost):
                        self.session.say(found.left_out(self.gallery.images.ids[client] for client in batch))
                        found = []
                    for line, image_id, row in found:
                        if not rows.done(line, [image_id]):
                            rows.append(row)
                    bar.advance(task, updates if workers > 1 else 0)
                bar.remove_task(task)
                self.console.print(f"{case.title}: done", highlight=False)

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
        for number, histories, _ in self.sent(case, victims, range(min(SAMPLED, len(victims)))):
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

    def rows_of(
        self, case: Case, plan: Plan, victims: Victims, advance: Callable[[], None], batch: Sequence[int]
    ) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
        """(what identifies a row, its image, the row) of every attack on a batch of clients."""
        found = []
        for number, client, name, one, last, _ in self.follow(case, plan, victims, batch, advance):
            line, image_id = self.case(victims, case, number, name, plan[number][name]), self.gallery.images.ids[client]
            found.append((line, image_id, {**self.session.columns, **one.row(line, image_id, last.gradient_norm())}))
        return found

    def sent(
        self, case: Case, victims: Victims, batch: Sequence[int], plan: Plan | None = None
    ) -> Iterator[tuple[int, list[list[Observation]], Sent]]:
        """Let clients send one update after the other.

        Args:
            plan: the attacks that read the updates; without them, gradients of the layers that make the tokens alone.

        Yields:
            (updates so far, each client's, what they sent of); all but the last update of a client are compressed.
        """
        clients, originals = victims.decode(batch)
        histories: list[list[Observation]] = [[] for _ in clients]
        built = self.subjects[case.block].built
        for number in range(1, (case.updates if clients else 0) + 1):
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            seen = victims.seen(built, MASKED, clients, originals, update=number - 1)
            due = (plan or {}).get(number, {})
            terms = victims.defense.loss_weights()
            observations = victims.observe(built, seen, clients, due.values(), terms, update=number - 1)
            for history, observation in zip(histories, observations, strict=True):
                history.append(observation)
            masks = torch.zeros(len(clients), math.prod(built.grid), dtype=torch.bool)
            masks = masks if seen.position_mask is None else seen.position_mask
            yield number, histories, Sent(clients, originals, masks, built.patch_size)
            for history in histories:
                history[-1] = remember(history[-1])

    def follow(
        self, case: Case, plan: Plan, victims: Victims, batch: Sequence[int], advance: Callable[[], None]
    ) -> Iterator[tuple[int, int, str, Scored, Observation, Tensor]]:
        """Let clients send one update after the other, and attack.

        Yields:
            (updates so far, client, attack, its scored answer, last observation, mask of the last update (N,)).
        """
        for number, histories, sent in self.sent(case, victims, batch, plan):
            for name, attack in plan.get(number, {}).items():
                found = attack.attack_many(histories)
                scored = score_found(attack, name, found, list(sent.originals[:, None]), self.score)
                pairs = zip(sent.clients, sent.originals, scored, histories, sent.masks, strict=True)
                for client, original, one, history, mask in pairs:
                    visible = psnr_of_patches(one.images, original, ~mask, sent.patch_size)
                    details = {**one.reconstruction.details, "psnr_visible": visible}
                    answer = replace(one.reconstruction, details=details)
                    yield number, client, name, replace(one, reconstruction=answer), history[-1], mask
            advance()

    def case(self, victims: Victims, case: Case, number: int, name: str, attack: Attack) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        subject, parameters = self.subjects[case.block], attack.parameters()
        found = victims.case(subject, self.options.defense, case.schedule, name, parameters, round=number)
        pixels = self.options.image_size
        return found if pixels is None else found | {"model": f"{found['model']}, {pixels} px"}

    def pictures(self) -> dict[str, tuple[Tensor, dict[int, Tensor]]]:
        """Embedded photographs, and what the first attack of the second experiment finds after 1, 2, ... updates.

        `PICTURED_ATTACK` where none is asked for by name. A defence with the option gamma is drawn at gamma 0.5.
        """
        gallery = load_gallery("photos", size=self.subjects["standard"].built.image_size, limit=PICTURED)
        defense = self.options.sweep([PICTURED_GAMMA])[0]
        case = Case(defense, "paper", counts=PICTURED_UPDATES)
        victims = self.session.victims(gallery, defense, self.options.seed)
        name = next((n for n in self.options.update_attacks if n not in (AUTO, ALL)), PICTURED_ATTACK)
        attack = build_attack(name, self.options.attack_settings().get(name))
        plan = {count: {name: attack} for count in PICTURED_UPDATES}
        found: dict[str, tuple[Tensor, dict[int, Tensor]]] = {}
        for number, client, _, one, _, _ in self.follow(case, plan, victims, range(len(victims)), lambda: None):
            name = gallery.images.ids[client].split("/")[0]
            found.setdefault(name, (gallery.images.images([client])[0], {}))[1][number] = (
                None if one.images is None else one.images[0].cpu()
            )
        return found


def _lacking(rows: RowLog, lines: Sequence[dict[str, Any]], victims: Victims, batch: Sequence[int]) -> bool:
    """Whether a row of these lines is missing for one of the clients."""
    return not all(rows.done(line, victims.ids(client)) for line in lines for client in batch)


def psnr_of_patches(images: Tensor | None, original: Tensor, chosen: Tensor, patch_size: int) -> float:
    """PSNR (dB) over the chosen patches (N,) of one image; NaN where there is no image or nothing is chosen."""
    if images is None or not chosen.any():
        return float("nan")
    error = F.avg_pool2d((images[0] - original).square().mean(dim=0)[None, None], patch_size).flatten()  # (N,)
    return float(-10 * error[chosen.to(error.device)].mean().clamp(min=LEAST_MSE).log10())
