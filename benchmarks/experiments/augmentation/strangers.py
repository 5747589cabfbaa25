"""How often updates of different images are joined, and of one; the protocol stands in `options.StrangerOptions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from rich.console import Console

from attacks import Observation, find_tokenizer
from attacks.closed_form.batch_rounds import BatchRounds, find_groups, read_step
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.same_image import Target
from experiments.augmentation.options import StrangerOptions
from experiments.augmentation.protocol import MASKED, PAIRS, PLAIN, victim
from experiments.augmentation.render import FALSE_MATCHES, STRANGERS
from experiments.session import Session
from fedmjp.audit.per_image import observe_together
from fedmjp.audit.victims import Subject, Victims, drifted
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.records.rows import RowLog

TOGETHER = 50  # images whose updates are computed together
NOT_COMPARED: Mapping[str, int | None] = {"shared": None, "kept": None}


def run(options: StrangerOptions, console: Console) -> None:
    """Compare, then write the table."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: StrangerOptions, console: Console) -> None:
        self.options, self.session = options, Session(options, console, STRANGERS)
        self.console = console

    def __call__(self) -> None:
        """Compare, then write the table."""
        o = self.options
        with self.session.rows() as rows:
            for gamma in o.gammas:
                self.single(replace(DEFENSES.get("mjp")(), gamma=gamma), rows)
            provenance = self.pairs(rows)
        self.session.finish("strangers", FALSE_MATCHES, images=provenance)
        self.console.print(pd.read_csv(o.out / "table.csv").to_string(index=False), highlight=False)

    def clients(self, defense: Defense) -> tuple[Subject, Victims]:
        """The model and one client for each image."""
        o, subject = self.options, victim(self.options, defense)
        subject.built.module.to(self.session.device)
        gallery = self.session.gallery(o.images, size=subject.built.image_size, limit=o.num_images, path=o.data_path)
        victims = Victims(gallery, defense, seed=o.seed, device=self.session.device, warn=self.session.say)
        return subject, victims

    def single(self, defense: Defense, rows: RowLog) -> None:
        """Updates of one image under MJP, each target compared by `Target.view_of`."""
        subject, victims = self.clients(defense)
        case = self.case(subject, victims, "mjp_rounds", defense.gamma, 1)
        targets = range(min(self.options.targets, len(victims)))
        if all(rows.done(case, victims.ids(client)) for client in targets):
            return
        updates = []
        for clients, views in self.observed(subject, victims, defense):
            updates += [(c, read_position_rows(view)) for c, view in zip(clients, views, strict=True)]
        solved = [(client, update, solve_masked(update)) for client, update in updates]
        for client, update, own in solved[: len(targets)]:
            if rows.done(case, victims.ids(client)):
                continue
            started, target = time.perf_counter(), Target.of(update, own)
            found = [target.view_of(other, its) is not None for c, other, its in solved if c != client]
            self.write(rows, case, victims.ids(client)[0], len(found), sum(found), time.perf_counter() - started)

    def observed(
        self, subject: Subject, victims: Victims, defense: Defense
    ) -> Iterator[tuple[Sequence[int], list[Observation]]]:
        """Every client's update."""
        setting = MASKED if hasattr(defense, "gamma") else PLAIN
        for batch in victims.batches(TOGETHER):
            clients, originals = victims.decode(batch)
            seen = victims.seen(subject.built, setting, clients, originals)
            terms = defense.loss_weights() if setting is MASKED else {}
            yield clients, victims.observe(subject.built, seen, clients, (), terms)

    def pairs(self, rows: RowLog) -> str:
        """Updates of two images each without a defence, compared by `find_groups`; returns the images' provenance."""
        defense = DEFENSES.get("none")()
        subject, victims = self.clients(defense)
        case = self.case(subject, victims, "batch_rounds", 0.0, PAIRS)
        steps, later = [], []
        moved = replace(subject, built=drifted(subject.built, self.options.drift, self.options.seed, 1))
        again = self.observed(moved, victims, defense)
        for clients, views in self.observed(subject, victims, defense):
            for start in range(0, len(clients) - PAIRS + 1, PAIRS):
                together = observe_together(views[start : start + PAIRS])
                steps.append((victims.ids(clients[start])[0], read_step(together)))
            later += next(again)[1] if len(later) < PAIRS * (self.options.targets + 1) else []
        tokenizer, attack = find_tokenizer(subject.built.module, _shape(subject)), BatchRounds()
        for number, (image_id, last) in enumerate(steps[: self.options.targets]):
            if rows.done(case, [image_id]):
                continue
            started, others = time.perf_counter(), [step for name, step in steps if name != image_id]
            same = [read_step(observe_together(pair)) for pair in _shared(later, number)]
            with torch.no_grad():
                joined, kept = (
                    sum(len(group) - 1 for group in find_groups(last, found, tokenizer, attack.tolerance, most))
                    for found, most in ((others, len(others) * PAIRS), (same, len(same) * PAIRS))
                )
            seconds = time.perf_counter() - started
            self.write(rows, case, image_id, len(others), joined, seconds, {"shared": len(same), "kept": kept})
        return victims.gallery.provenance

    def case(self, subject: Subject, victims: Victims, attack: str, gamma: float, size: int) -> dict:
        """The values that identify a row, but for the image."""
        named = {"dataset": victims.gallery.name, "model": subject.built.name, "weights": subject.built.provenance}
        return {
            **named,
            "attack": attack,
            "gamma": gamma,
            "batch_size": size,
            "images": len(victims),
            "seed": self.options.seed,
        }

    def write(
        self,
        rows: RowLog,
        case: dict,
        image_id: str,
        pairs: int,
        joined: int,
        seconds: float,
        true: Mapping[str, int | None] = NOT_COMPARED,
    ) -> None:
        """Append one target's row; `true` counts the updates that do share an image, and those of them joined."""
        found = {"image_id": image_id, "pairs": pairs, "joined": joined, **true, "seconds": seconds}
        rows.append({**self.session.columns, **case, **found})


def _shared(views: Sequence[Observation], number: int) -> list[list[Observation]]:
    """Later updates that share one image each with the `number`-th, whose other image is one of the next batch."""
    ours, others = (views[PAIRS * n : PAIRS * (n + 1)] for n in (number, number + 1))
    return [[one, other] for one, other in zip(ours, others, strict=False)]


def _shape(subject: Subject) -> tuple[int, int, int]:
    return 3, subject.built.image_size, subject.built.image_size
