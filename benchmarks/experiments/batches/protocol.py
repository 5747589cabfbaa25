"""Attacks on batches of two or three images, from one step and from several steps with different batches.

Which image is in which batch follows the lines of an affine plane; the protocol is described in `options.Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from torch import Tensor

from attacks import Attack, Observation
from experiments.batches.options import Options
from experiments.batches.render import BATCHES
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

PLAIN = Setting("plain", defended=False, hidden=False, against="original")


def affine_plane(order: int) -> list[list[int]]:
    """Lines of the affine plane over the integers modulo a prime: order^2 + order lists of `order` points.

    Any two points share exactly one line; the last `order` lines are parallel and hold every point once.
    """
    points = range(order)
    sloped = [[order * x + (m * x + b) % order for x in points] for m in points for b in points]
    return sloped + [[order * x + y for y in points] for x in points]


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
        gallery = self.session.gallery(options.images, size=built.image_size, limit=options.num_images)
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

    def attack(self, size: int, rows: RowLog) -> dict[str, Attack]:
        """Write every row of one batch size that is missing; returns the attacks."""
        planes = [range(s, s + size**2) for s in range(0, len(self.victims) - size**2 + 1, size**2)]
        attacks = self.chosen(planes, size)
        cases = {name: self.case(size, name, attack) for name, attack in attacks.items()}
        with self.session.bar() as bar:
            task = bar.add_task(f"batches of {size}", total=len(planes) * (size**2 + 2 * size))
            for plane in planes:
                ids = [self.victims.gallery.images.ids[c] for c in plane]
                if all(rows.done(case, [i]) for case in cases.values() for i in ids):
                    bar.advance(task, size**2 + 2 * size)
                    continue
                for name, client, place, one, last in self.follow(
                    self.victims, plane, size, attacks, lambda: bar.advance(task)
                ):
                    image_id = self.victims.gallery.images.ids[client]
                    if not rows.done(cases[name], [image_id]):
                        row = one.row(cases[name], image_id, last.gradient_norm(), place)
                        rows.append({**self.session.columns, **row})
        return attacks

    def chosen(self, planes: Sequence[Sequence[int]], size: int) -> dict[str, Attack]:
        """The attacks on the last step, chosen by the steps of the first plane whose images can all be decoded."""
        steps: list[Observation] = []
        for plane in planes if AUTO in self.options.attacks else ():
            clients, originals = self.victims.decode(plane)
            if len(clients) == len(plane):
                steps = list(self.sent(self.victims, clients, originals, size, ()))
                break
        names = [name for name in self.options.attacks if steps or name != AUTO]
        return self.session.suite(names, steps, self.subject.threat_model)

    def sent(
        self, victims: Victims, clients: Sequence[int], originals: Tensor, size: int, attacks: Collection[Attack]
    ) -> Iterator[Observation]:
        """The updates of all steps of one plane, with the gradients that the attacks read."""
        for number, line in enumerate(affine_plane(size), start=1):
            built = self.subject.built
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            members = [clients[i] for i in line]
            seen = victims.seen(built, PLAIN, members, originals[line])
            yield observe_together(victims.observe(built, seen, members, attacks))

    def follow(
        self,
        victims: Victims,
        plane: Sequence[int],
        size: int,
        attacks: Mapping[str, Attack],
        advance: Callable[[], None],
    ) -> Iterator[tuple[str, int, int, Scored, Observation]]:
        """Let the images of one plane go through all its steps, then attack the last `size` of them.

        Yields:
            (attack, client, place in the batch, the batch's scored answer, the attacked step).
        """
        clients, originals = victims.decode(plane)
        if len(clients) < len(plane):
            return  # without a picture that cannot be decoded, lines of its plane are not full
        lines, steps = affine_plane(size), []
        for step in self.sent(victims, clients, originals, size, attacks.values()):
            steps.append(step)
            advance()
        for index in range(len(lines) - size, len(lines)):
            history, line = [*steps[:index], *steps[index + 1 :], steps[index]], lines[index]
            for name, attack in attacks.items():
                one = score_found(attack, name, [attack(history)], [originals[line]], self.score)[0]
                for place, member in enumerate(line):
                    yield name, clients[member], place, one, steps[index]
            advance()

    def case(self, size: int, name: str, attack: Attack) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        case = self.victims.case(self.subject, "none", PLAIN.name, name, attack.parameters(), round=size + 1)
        return case | {"batch_size": size}

    def picture(self, size: int, attacks: Mapping[str, Attack]) -> None:
        """Draw the embedded photographs of one plane, each with its reconstruction from one step and from all steps."""
        victims = self.holding(load_gallery("photos", size=self.subject.built.image_size, limit=size**2))
        panels: dict[int, Panel] = {}
        for name, client, place, one, _ in self.follow(victims, range(size**2), size, attacks, lambda: None):
            image = victims.gallery.images.images([client])[0]
            title = victims.gallery.images.ids[client].split("/")[0].replace("_", " ")
            panel = panels.setdefault(client, Panel(title, image, self._step_of(victims, client, size)))
            found: Tensor | None = None if one.images is None else one.images[place]
            panel.reconstructions[name] = Reconstructed(found, one.records[place]["psnr"], one.diagnosis)
        title = f"{self.subject.built.name}, batches of {size}"
        path = self.options.out / "separated.png"
        reconstructions_figure(list(panels.values()), path, seen_title="batch mean", title=title)

    def _step_of(self, victims: Victims, client: int, size: int) -> Tensor:
        """Mean image of the batch in which a client's image was attacked."""
        line = next(line for line in affine_plane(size)[-size:] if client in line)
        return victims.gallery.images.images(line).mean(dim=0)
