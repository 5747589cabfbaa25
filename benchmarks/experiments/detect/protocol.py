"""What clients check of the models that they are sent; the protocol stands in `options.Options`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from attacks.active.base import ActiveAttack
from experiments.detect.federation import GRANTS, Turn, active_attacks, held_once, plain, probes, train
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
        found = [self.case(turn, HONEST, {}, 0) for turn in turns]
        for turn in filter(self.attacked, turns):
            found += [self.case(turn, n, a.parameters(), p) for n, a, p in self.attacks(turn)]
        return found

    def attacked(self, turn: Turn) -> bool:
        """Whether attacks are checked in this turn."""
        o = self.options
        chosen = turn.round in o.attacked_rounds and turn.client < o.attacked_clients
        return chosen and self.federation.purpose == EVALUATION

    def attacks(self, turn: Turn) -> list[tuple[str, ActiveAttack, int]]:
        """(name, attack, number of the prepared round) of every check of an attack in this turn."""
        found = [(name, attack, p) for name, attack in self.active.items() for p in range(1, PROBES + 1)]
        target = held_once(turn)
        for strength in self.options.strengths if self.config.federation.update == "gradient" else ():
            found.append((ADAPTIVE, build_attack(ADAPTIVE, {"target": target, "strength": strength}), 1))
        return found

    def check(self, turn: Turn) -> None:
        """Write the rows of one client in one round that are missing."""
        case = self.case(turn, HONEST, {}, 0)
        if not self.rows.has(case):
            self.write(case, *timed(turn.measure), None)
        if not self.attacked(turn):
            return
        wanted: dict[tuple[str, str], tuple[ActiveAttack, list[int]]] = {}
        for name, attack, number in self.attacks(turn):
            if not self.rows.has(self.case(turn, name, attack.parameters(), number)):
                wanted.setdefault((name, str(attack)), (attack, []))[1].append(number)
        for (name, _), (attack, numbers) in wanted.items():
            self.check_attack(turn, name, attack, numbers)

    def check_attack(self, turn: Turn, name: str, attack: ActiveAttack, numbers: list[int]) -> None:
        """Write the rows of one attack on one client, of the prepared rounds `numbers`."""
        originals = turn.task.batch(turn.client, turn.round, 0).images
        for number, (changes, answer, history) in enumerate(probes(turn, attack, max(numbers)), start=1):
            if number not in numbers:
                continue
            found = timed(partial(turn.measure, changes))
            given = run_attack(attack, name, [*history, answer()], originals, self.score)
            values = [record["psnr"] for record in given.records if record["psnr"] == record["psnr"]]
            self.write(self.case(turn, name, attack.parameters(), number), *found, values, given.diagnosis)

    def case(self, turn: Turn, attack: str, parameters: dict[str, Any], number: int) -> dict[str, Any]:
        """The values that identify a row."""
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
            "threat_model": sorted(c.value for c in GRANTS.grants) if attack != HONEST else [],
            "attack": attack,
            "attack_parameters": dict(parameters),
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
