"""Attacks on batches of two or three images, from one step and from several steps with different batches.

Which image is in which batch follows the lines of an affine plane, or the shuffles of a training loop; the protocol is
described in `options.Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from torch import Tensor

from attacks import Attack, Observation
from attacks.memory import remember
from experiments.batches.options import PLANES, Options
from experiments.batches.render import BATCHES, PLANE
from experiments.session import AttackSession
from fedmjp.audit.harness import Scored, score_found
from fedmjp.audit.per_image import observe_together
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.budgets import AUTO
from fedmjp.data import Gallery, load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog
from fedmjp.report import Panel, Reconstructed, reconstructions_figure

PLAIN = Setting(PLANE, defended=False, hidden=False, against="original")


def affine_plane(order: int) -> list[list[int]]:
    """Lines of the affine plane over the integers modulo a prime: order^2 + order lists of `order` points.

    Any two points share exactly one line; the last `order` lines are parallel and hold every point once.
    """
    points = range(order)
    sloped = [[order * x + (m * x + b) % order for x in points] for m in points for b in points]
    return sloped + [[order * x + y for y in points] for x in points]


@dataclass(frozen=True)
class Schedule:
    """Which images a client trains on in which step.

    Attributes:
        name: of the schedule, in rows.
        steps: the images of every step, by their number in the group that the schedule is for.
        attacked: numbers of the steps that are attacked.
        times: steps that each image is in.
    """

    name: str
    steps: list[list[int]]
    attacked: range
    times: int

    @classmethod
    def of_plane(cls, order: int) -> Schedule:
        """The lines of an affine plane; the last `order` of them, which hold every image once, are attacked."""
        lines = affine_plane(order)
        return cls(PLANE, lines, range(len(lines) - order, len(lines)), order + 1)

    @classmethod
    def shuffled(cls, images: int, size: int, epochs: int, targets: int, seed: int) -> Schedule:
        """Epochs of all images in batches of `size`, shuffled anew; the first batches of the last one are attacked.

        What is left of an epoch beyond full batches is not sent.
        """
        generator = np.random.default_rng([seed, size])
        orders = [generator.permutation(images) for _ in range(epochs)]
        full = images // size
        steps = [batch.tolist() for order in orders for batch in order[: full * size].reshape(full, size)]
        attacked = range((epochs - 1) * full, (epochs - 1) * full + min(targets, full))
        return cls(f"shuffled epochs of {images:,} images", steps, attacked, epochs)

    @property
    def members(self) -> list[int]:
        """The images of the steps that are attacked, in their order."""
        return [image for number in self.attacked for image in self.steps[number]]


def run(options: Options, console: Console) -> None:
    """Attack, then write table and figure."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console, self.session = options, console, AttackSession(options, console)
        classes = classes_of(options.model, options.weights) or IMAGENET_CLASSES
        built = build_model(options.model, num_classes=classes, weights=options.weights, seed=options.seed)
        built.module.to(self.session.device).eval()
        self.subject = Subject(built)
        self.score = self.session.scorer(built.patch_size)
        place = {"limit": options.num_images, "path": options.data_path}
        gallery = self.session.gallery(options.images, size=built.image_size, **place)
        self.victims = self.holding(gallery)

    def holding(self, gallery: Gallery) -> Victims:
        """The clients of these images."""
        return self.session.victims(gallery, DEFENSES.get("none")(), self.options.seed)

    def __call__(self) -> None:
        """Attack, then write table and figure."""
        with self.session.rows() as rows:
            chosen = {size: self.attack(size, rows) for size in self.options.batch_sizes}
        self.picture(*min(chosen.items(), key=lambda item: item[0]))
        self.session.finish("batch_rounds", BATCHES, images=self.victims.gallery.provenance)
        self.console.print(pd.read_csv(self.options.out / "table.csv").to_string(index=False), highlight=False)

    def schedule(self, size: int, images: int) -> Schedule:
        """The steps of a group of so many images, in batches of `size`."""
        o = self.options
        return Schedule.shuffled(images, size, o.epochs, o.targets, o.seed) if o.epochs else Schedule.of_plane(size)

    def groups(self, size: int) -> list[Sequence[int]]:
        """The images that meet each other in batches of `size`: those of each plane, or all of the client."""
        if self.options.epochs:
            return [range(len(self.victims))] if len(self.victims) >= size else []
        return [range(s, s + size**2) for s in range(0, len(self.victims) - size**2 + 1, size**2)]

    def attack(self, size: int, rows: RowLog) -> dict[str, Attack]:
        """Write every row of one batch size that is missing; returns the attacks."""
        groups = self.groups(size)
        attacks = self.chosen(groups, size)
        names = self.victims.gallery.images.ids
        with self.session.bar() as bar:
            schedules = [self.schedule(size, len(group)) for group in groups]
            task = bar.add_task(f"batches of {size}", total=sum(len(s.steps) + len(s.attacked) for s in schedules))
            for group, schedule in zip(groups, schedules, strict=True):
                cases = {name: self.case(schedule, size, name, attack) for name, attack in attacks.items()}
                ids = [names[group[member]] for member in schedule.members]
                if all(rows.done(case, [i]) for case in cases.values() for i in ids):
                    bar.advance(task, len(schedule.steps) + len(schedule.attacked))
                    continue
                for name, client, place, one, last in self.follow(
                    self.victims, group, schedule, attacks, lambda: bar.advance(task)
                ):
                    if not rows.done(cases[name], [names[client]]):
                        row = one.row(cases[name], names[client], last.gradient_norm(), place)
                        rows.append({**self.session.columns, **row})
        return attacks

    def chosen(self, groups: Sequence[Sequence[int]], size: int) -> dict[str, Attack]:
        """The attacks on the last step, chosen by the steps of the first images that can all be decoded.

        They are those of as many images as a plane holds, also where batches are shuffled: few steps decide.
        """
        steps: list[Observation] = []
        for group in groups if AUTO in self.options.attacks else ():
            few = group[: size**2]
            clients, originals = self.victims.decode(few)
            if len(clients) == len(few):
                steps = list(self.sent(self.victims, clients, originals, self.schedule(size, len(few)).steps, ()))
                break
        names = [name for name in self.options.attacks if steps or name != AUTO]
        return self.session.suite(names, steps, self.subject.threat_model)

    def sent(
        self,
        victims: Victims,
        clients: Sequence[int],
        originals: Tensor,
        steps: Sequence[Sequence[int]],
        attacks: Collection[Attack],
    ) -> Iterator[Observation]:
        """The updates of all steps, with the gradients that the attacks read."""
        for number, line in enumerate(steps, start=1):
            built = self.subject.built
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            members = [clients[i] for i in line]
            seen = victims.seen(built, PLAIN, members, originals[line])
            yield observe_together(victims.observe(built, seen, members, attacks))

    def follow(
        self,
        victims: Victims,
        group: Sequence[int],
        schedule: Schedule,
        attacks: Mapping[str, Attack],
        advance: Callable[[], None],
    ) -> Iterator[tuple[str, int, int, Scored, Observation]]:
        """Let the images of one group go through all their steps, then attack some of these.

        Yields:
            (attack, client, place in the batch, the batch's scored answer, the attacked step).
        """
        clients, originals = victims.decode(group)
        if len(clients) < len(group):
            return  # without a picture that cannot be decoded, batches are not full
        steps: list[Observation] = []
        for number, step in enumerate(self.sent(victims, clients, originals, schedule.steps, attacks.values())):
            steps.append(step if number in schedule.attacked else remember(step))
            advance()
        for index in schedule.attacked:
            history, line = [*steps[:index], *steps[index + 1 :], steps[index]], schedule.steps[index]
            for name, attack in attacks.items():
                one = score_found(attack, name, [attack(history)], [originals[line]], self.score)[0]
                for place, member in enumerate(line):
                    yield name, clients[member], place, one, steps[index]
            advance()

    def case(self, schedule: Schedule, size: int, name: str, attack: Attack) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        parameters = attack.parameters()
        case = self.victims.case(self.subject, "none", schedule.name, name, parameters, round=schedule.times)
        return case | {"batch_size": size}

    def picture(self, size: int, attacks: Mapping[str, Attack]) -> None:
        """Draw the embedded photographs of one plane, each with its reconstruction from one step and from all steps.

        The smallest plane where no plane has batches of `size`.
        """
        schedule = Schedule.of_plane(size if size in PLANES else min(PLANES))
        count = len(schedule.members)
        victims = self.holding(load_gallery("photos", size=self.subject.built.image_size, limit=count))
        panels: dict[int, Panel] = {}
        for name, client, place, one, _ in self.follow(victims, range(count), schedule, attacks, lambda: None):
            image = victims.gallery.images.images([client])[0]
            title = victims.gallery.images.ids[client].split("/")[0].replace("_", " ")
            batch = next(schedule.steps[number] for number in schedule.attacked if client in schedule.steps[number])
            mixed = victims.gallery.images.images(batch).mean(dim=0)
            panel = panels.setdefault(client, Panel(title, image, mixed))
            found: Tensor | None = None if one.images is None else one.images[place]
            panel.reconstructions[name] = Reconstructed(found, one.records[place]["psnr"], one.diagnosis)
        title = f"{self.subject.built.name}, batches of {len(schedule.steps[0])}"
        path = self.options.out / "separated.png"
        reconstructions_figure(list(panels.values()), path, seen_title="batch mean", title=title)
