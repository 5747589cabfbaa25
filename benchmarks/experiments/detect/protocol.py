"""What clients check of the models that they are sent; the protocol stands in `options.Options`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from experiments.detect.federation import Prepared, Turn, active_attacks, held_once, plain, probes, train, trained_on
from experiments.detect.options import ADAPTIVE, EVALUATION, Federation, Options
from experiments.detect.render import DETECT, HONEST, ROWS
from experiments.session import Session
from fedmjp.audit.harness import run_attack, scorer
from fedmjp.audit.verdict import RECOGNISABLE
from fedmjp.budgets import build_attack
from fedmjp.client import shared_task
from fedmjp.detect import Measurement
from fedmjp.records.rows import RowLog

PROBES = 2  # prepared rounds that follow each other


def run(options: Options, console: Console) -> None:
    """Train, check and attack, then write tables and figures."""
    session = Session(options, console, ROWS)
    with session.rows() as rows:
        for federation in options.federations():
            Checked(options, session, federation, rows)()
    session.finish("detect", DETECT)
    console.print((options.out / "table.csv").read_text(), highlight=False)


class Checked:
    """One federation whose clients write a row for each model that they check."""

    def __init__(self, options: Options, session: Session, federation: Federation, rows: RowLog) -> None:
        self.options, self.session, self.federation, self.rows = options, session, federation, rows
        self.config = plain(federation.config)
        self.task = shared_task(self.config.order(), options.defense, self.config.client_entropy())
        session.check_images(trained_on(self.task))
        self.score, self.active = scorer(self.task.model.patch_size, None), active_attacks(self.task, session.say)

    def __call__(self) -> None:
        """Train it, unless all of its rows are there."""
        f = self.config.federation
        words = f"{self.federation.purpose}: {self.federation.start}, {f.partition}, {f.update}"
        if all(self.rows.has(case) for case in self.cases()):
            self.session.say(f"{words}: finished before")
            return
        with self.session.bar() as bar:
            task: TaskID = bar.add_task(words, total=f.rounds)
            train(self.config, self.check, lambda: bar.advance(task))
        self.session.say(f"{words}: done")

    def cases(self) -> list[dict[str, Any]]:
        """What identifies the rows of this federation, as far as it is known before it is trained."""
        f = self.config.federation
        turns = [Turn(self.task, r, c, {}, None) for r in range(1, f.rounds + 1) for c in range(f.clients)]
        found = [self.case(turn) for turn in turns]
        for turn in filter(self.attacked, turns):
            found += [self.case(turn, *both) for both in self.attacks(turn)]
        return found

    def attacked(self, turn: Turn) -> bool:
        """Whether attacks are checked in this turn."""
        o = self.options
        chosen = turn.round in o.attacked_rounds and turn.client < o.attacked_clients
        return chosen and self.federation.purpose == EVALUATION

    def attacks(self, turn: Turn) -> list[tuple[Prepared, int]]:
        """(what the server does, number of the prepared round) of every check of an attack in this turn."""
        found = [(prepared, number) for prepared in self.active for number in range(1, PROBES + 1)]
        target = held_once(turn)
        for strength in self.options.strengths if self.config.federation.update == "gradient" else ():
            weaker = build_attack(ADAPTIVE, {"target": target, "strength": strength})
            found.append((Prepared(ADAPTIVE, weaker), 1))
        return found

    def check(self, turn: Turn) -> None:
        """Write the rows of one client in one round that are missing."""
        case = self.case(turn)
        if not self.rows.has(case):
            self.write(case, *timed(turn.measure), None)
        if not self.attacked(turn):
            return
        wanted: dict[str, tuple[Prepared, list[int]]] = {}
        for prepared, number in self.attacks(turn):
            if not self.rows.has(self.case(turn, prepared, number)):
                wanted.setdefault(str(prepared), (prepared, []))[1].append(number)
        for prepared, numbers in wanted.values():
            self.check_attack(turn, prepared, numbers)

    def check_attack(self, turn: Turn, prepared: Prepared, numbers: list[int]) -> None:
        """Write the rows of one attack that one client checks, of the prepared rounds `numbers`."""
        attacked = turn.attacked(prepared.place)
        originals = turn.task.batch(attacked.client, attacked.round, 0).images
        for number, (sending, answer, history) in enumerate(probes(turn, prepared, max(numbers)), start=1):
            if number not in numbers:
                continue
            found = timed(partial(turn.measure, sending))
            given = run_attack(prepared.attack, prepared.name, [*history, answer()], originals, self.score)
            values = [record["psnr"] for record in given.records if record["psnr"] == record["psnr"]]
            self.write(self.case(turn, prepared, number), *found, values, given.diagnosis)

    def case(self, turn: Turn, prepared: Prepared | None = None, number: int = 0) -> dict[str, Any]:
        """The values that identify a row; without an attack, of what an honest server sends."""
        f, task = self.config.federation, turn.task
        return {
            "dataset": task.data.name,
            "model": task.model.name,
            "weights": task.model.provenance,
            "start": self.federation.start,
            "defense": self.options.defense,
            "purpose": self.federation.purpose,
            "partition": f.partition,
            "update": f.update,
            "optimizer": self.config.local.optimizer,
            "learning_rate": f.learning_rate,
            "batch_size": f.batch_size,
            "local_steps": f.local_steps,
            "clients": f.clients,
            "train_limit": self.config.data.train_limit,
            "seed": self.config.seed,
            "threat_model": sorted(c.value for c in prepared.threat_model.grants) if prepared else [],
            "attack": prepared.name if prepared else HONEST,
            "attack_parameters": dict(prepared.attack.parameters()) if prepared else {},
            "place": prepared.place if prepared else 0,
            "probe": number,
            "round": turn.round,
            "client": turn.client,
        }

    def write(
        self,
        case: dict[str, Any],
        found: dict[str, Measurement],
        seconds: float,
        psnr: list[float] | None,
        diagnosis: str = "",
    ) -> None:
        """Append one row.

        Args:
            seconds: of the check.
            psnr: of the images that an attack returned, each against its original; None for an honest server.
        """
        values = {name: one.value for name, one in found.items()}
        unstated = {name: one.about for name, one in found.items() if one.value is None}
        gained = {"psnr": None, "recovered": None}
        if psnr is not None:
            gained = {"psnr": max(psnr, default=None), "recovered": sum(value > RECOGNISABLE for value in psnr)}
        answer = {"statistics": values, "unstated": unstated, **gained, "seconds": seconds, "diagnosis": diagnosis}
        self.rows.append({**self.session.columns, **case, **answer})


def timed(check: Callable[[], dict[str, Measurement]]) -> tuple[dict[str, Measurement], float]:
    """What a check finds, and the seconds that it takes."""
    start = time.perf_counter()
    return check(), time.perf_counter() - start
