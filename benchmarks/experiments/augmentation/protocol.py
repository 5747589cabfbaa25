"""Attacks over several updates on clients that augment; the protocol stands in `options.Options`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Observation
from attacks.memory import remember
from experiments.augmentation.options import Options
from experiments.augmentation.render import AGAINST, AUGMENTATION, WITHHELD_ROUNDS
from experiments.augmentation.views import AUGMENTATIONS, photograph
from experiments.batches.protocol import affine_plane
from experiments.rendering import Rendering
from experiments.session import TableRun
from experiments.withheld.groups import without
from fedmjp.audit.harness import score_found
from fedmjp.audit.per_image import observe_groups, observe_together
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog

MASKED = Setting("masked", defended=True, hidden=True, against="seen")
PLAIN = Setting("plain", defended=False, hidden=False, against="seen")
TOGETHER = 6  # clients whose updates are computed together
PAIRS = 2  # images of a batch


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


def victim(options, defense: Defense) -> Subject:
    """The model that clients of this defence are sent."""
    name = defense.model_name(options.model) if hasattr(defense, "model_name") else options.model
    classes, dal = classes_of(name, options.weights) or IMAGENET_CLASSES, getattr(defense, "dal", "none")
    built = build_model(name, num_classes=classes, weights=options.weights, dal=dal, seed=options.seed)
    built.module.eval()
    return Subject(built)


class Run(TableRun):
    """One call of the benchmark."""

    program = "augmentation"

    @property
    def rendering(self) -> Rendering:
        """See `TableRun`; its own where gradients of positions are withheld."""
        return WITHHELD_ROUNDS if self.options.withhold else AUGMENTATION

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        o = self.options
        for name in o.augmentations():
            for gamma in o.gammas:
                self.rounds(replace(DEFENSES.get("mjp")(), gamma=gamma), name, rows)
            if o.batches:
                self.batches(name, rows)
        return self.provenance

    def clients(self, defense: Defense) -> tuple[Subject, Victims]:
        """The model and the clients, whose images are scenes: a patch larger than the model's on each side."""
        o, subject = self.options, victim(self.options, defense)
        subject.built.module.to(self.session.device)
        size = subject.built.image_size + 2 * subject.built.patch_size
        gallery = self.session.gallery(o.images, size=size, limit=o.num_images, path=o.data_path)
        self.provenance = gallery.provenance
        return subject, self.session.victims(gallery, defense, o.seed)

    def views(self, victims: Victims, clients: Sequence[int], scenes: Tensor, name: str, number: int, p: int) -> Tensor:
        """The view that each client makes of its scene for its update of this number, (clients, C, H, W)."""
        keys = [f"{self.options.seed} {victims.ids(client)[0]} {name} {number}" for client in clients]
        generators = [torch.Generator().manual_seed(zlib.crc32(key.encode())) for key in keys]
        return torch.stack([AUGMENTATIONS[name](s, p, g) for s, g in zip(scenes, generators, strict=True)])

    def rounds(self, defense: Defense, name: str, rows: RowLog) -> None:
        """Clients of one image under MJP, attacked after their last update."""
        o, (subject, victims) = self.options, self.clients(defense)
        names = ("mjp_rounds",) if o.withhold else ("mjp_subspace", "mjp_rounds")
        attacks = {attack: ATTACKS.get(attack)() for attack in names}
        with self.session.bar() as bar:
            task = bar.add_task(f"{name}, gamma {defense.gamma}", total=len(victims))
            for batch in victims.batches(TOGETHER):
                if self.lacking(rows, subject, victims, "mjp", name, attacks, o.updates, batch):
                    clients, scenes = victims.decode(batch)
                    *_, (histories, views) = self.sent(subject, victims, clients, scenes, name)
                    originals = photograph(scenes, subject.built.patch_size)
                    for attack in attacks:
                        found = attacks[attack].attack_many(histories)
                        targets = dict(zip(AGAINST, (views.clamp(0, 1), originals), strict=True))
                        for against, images in targets.items():
                            case = self.case(subject, victims, "mjp", f"{name}: {against}", attacks, attack, o.updates)
                            score = self.session.scorer(subject.built.patch_size)
                            scored = score_found(attacks[attack], attack, found, list(images[:, None]), score)
                            for client, one, history in zip(clients, scored, histories, strict=True):
                                self.write(rows, case, one, victims.ids(client)[0], 0, history[-1])
                bar.advance(task, len(batch))

    def sent(
        self, subject: Subject, victims: Victims, clients: Sequence[int], scenes: Tensor, name: str
    ) -> Iterator[tuple[list[list[Observation]], Tensor]]:
        """Let clients send one update after the other; yields all so far and the views of the last one."""
        built, histories = subject.built, [[] for _ in clients]
        for number in range(1, self.options.updates + 1):
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            views = self.views(victims, clients, scenes, name, number, built.patch_size)
            seen = victims.seen(built, MASKED, clients, views, update=number - 1)
            observations = self.observe(Subject(built), victims, seen, clients, number - 1)
            for history, observation in zip(histories, observations, strict=True):
                history[-1:] = [*map(remember, history[-1:]), observation]
            yield histories, views

    def observe(self, subject: Subject, victims: Victims, seen, clients: Sequence[int], update: int) -> list:
        """The clients' updates, as they are sent."""
        terms = victims.defense.loss_weights()
        if not self.options.withhold:
            return victims.observe(subject.built, seen, clients, (), terms, update=update)
        views = observe_groups(subject.built, seen, victims.labels(subject.built, clients), 1, terms)
        return [without(view, "position embedding") for view in views]

    def batches(self, name: str, rows: RowLog) -> None:
        """Clients of four images in batches of two, without a defence."""
        subject, victims = self.clients(DEFENSES.get("none")())
        attacks, lines = {"batch_rounds": ATTACKS.get("batch_rounds")()}, affine_plane(PAIRS)
        count, built, score = PAIRS**2, subject.built, self.session.scorer(subject.built.patch_size)
        models = [drifted(built, self.options.drift, self.options.seed, n) if n else built for n in range(len(lines))]
        for start in range(0, len(victims) - count + 1, count):
            group = range(start, start + count)
            clients, scenes = victims.decode(group)
            updates = len(lines)
            if len(clients) < count or not self.lacking(rows, subject, victims, "none", name, attacks, updates, group):
                continue
            steps, views = [], []
            for number, (line, model) in enumerate(zip(lines, models, strict=True), start=1):
                members = [clients[i] for i in line]
                views.append(self.views(victims, members, scenes[line], name, number, built.patch_size))
                seen = victims.seen(model, PLAIN, members, views[-1])
                steps.append(observe_together(self.observe(Subject(model), victims, seen, members, None)))
            for last in range(len(lines) - PAIRS, len(lines)):
                found = attacks["batch_rounds"]([*steps[:last], *steps[last + 1 :], steps[last]])
                originals = photograph(scenes[lines[last]], built.patch_size)
                for against, images in zip(AGAINST, (views[last].clamp(0, 1), originals), strict=True):
                    case = self.case(subject, victims, "none", f"{name}: {against}", attacks, "batch_rounds", updates)
                    one = score_found(attacks["batch_rounds"], "batch_rounds", [found], [images], score)[0]
                    for place, member in enumerate(lines[last]):
                        self.write(rows, case, one, victims.ids(clients[member])[0], place, steps[last])

    def case(self, subject, victims: Victims, defense: str, setting: str, attacks, attack: str, updates: int) -> dict:
        """The values that identify a row (`records.rows.CASE`)."""
        case = victims.case(subject, defense, setting, attack, attacks[attack].parameters(), round=updates)
        return case | {"batch_size": PAIRS if defense == "none" else 1}

    def lacking(self, rows: RowLog, subject, victims, defense: str, name: str, attacks, updates: int, batch) -> bool:
        """Whether a row of these clients is missing."""
        settings = [f"{name}: {against}" for against in AGAINST]
        cases = [self.case(subject, victims, defense, s, attacks, a, updates) for s in settings for a in attacks]
        return not all(rows.done(case, victims.ids(client)) for case in cases for client in batch)

    def write(self, rows: RowLog, case: dict, one, image_id: str, place: int, last: Observation) -> None:
        """Append one row, unless it is there."""
        if not rows.done(case, [image_id]):
            rows.append({**self.session.columns, **one.row(case, image_id, last.gradient_norm(), place)})
