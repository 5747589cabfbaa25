"""Rows of the calibration: each attack after each number of updates, with its confidence, certificate and score.

What is compared: `options.Options`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd
from rich.console import Console
from torch import Tensor

from attacks import Attack, Capability, Observation
from attacks.memory import remember
from experiments.calibration.options import Options
from experiments.calibration.render import CALIBRATION
from experiments.session import AttackSession
from fedmjp.audit.harness import Scored, run_attack
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.budgets import AUTO
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import patch_recovery
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import RowLog

Plan = dict[int, dict[str, Attack]]  # number of updates -> the attacks that follow, by name


@dataclass(frozen=True)
class Case:
    """Clients at one masking ratio: what they are sent, and the defence's name and setting.

    Attributes:
        sent: the model of each update, the first one undrifted; the same for all clients.
    """

    built: BuiltModel
    defense: str
    setting: Setting
    victims: Victims
    sent: list[BuiltModel] = field(default_factory=list)

    def model(self, number: int, options: Options) -> BuiltModel:
        """The model that clients are sent for their `number`-th update, counted from 1."""
        for missing in range(len(self.sent) + 1, number + 1):
            drift = drifted(self.sent[-1], options.drift, options.seed, missing) if self.sent else self.built
            self.sent.append(drift)
        return self.sent[number - 1]


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    session = AttackSession(options, console)
    with session.rows(seed=options.seed) as rows, session.bar() as bar:
        for gamma in options.gammas:
            case = _case(options, session, gamma)
            plan = _plan(options, session, case)
            task = bar.add_task(f"gamma {gamma:g}", total=len(case.victims))
            for client in range(len(case.victims)):
                _attack_client(options, session, case, plan, client, rows)
                bar.advance(task)
            console.print(f"gamma {gamma:g}: done", highlight=False)
    session.finish("calibration", CALIBRATION)
    console.print(pd.read_csv(options.out / "table.csv").to_string(index=False), highlight=False)


def _case(options: Options, session: AttackSession, gamma: float) -> Case:
    name = "mjp" if gamma else "none"
    defense = DEFENSES.get(name)(**({"gamma": gamma} if gamma else {}))
    model = defense.model_name(options.model)
    classes = classes_of(model, options.weights) or IMAGENET_CLASSES
    dal = getattr(defense, "dal", "none")
    built = build_model(model, num_classes=classes, weights=options.weights, dal=dal, seed=options.seed)
    built.module.to(session.device).eval()
    gallery = session.gallery(options.images, size=built.image_size, limit=options.num_images)
    setting = Setting("original", defended=bool(gamma), hidden=bool(gamma), against="original")
    return Case(built, name, setting, session.victims(gallery, defense, options.seed))


def _plan(options: Options, session: AttackSession, case: Case) -> Plan:
    """Number of updates -> the attacks that follow; after the first update those that read several."""
    victims, threat = case.victims, Subject(case.built).threat_model
    if AUTO in options.attacks:
        readable = (victims.decode([client]) for client in range(len(victims)))
        clients, originals = next((found for found in readable if found[0]), ([], None))
        histories = _histories(options, case, clients, originals)
        chosen = {
            n: session.suite(options.attacks, history, threat) for n, history in histories if n in options.updates
        }
    else:
        chosen = dict.fromkeys(options.updates, session.suite(options.attacks, [], threat))
    return {
        number: {name: a for name, a in attacks.items() if number == 1 or Capability.SEVERAL_ROUNDS in a.needs}
        for number, attacks in chosen.items()
    }


def _attack_client(options: Options, session: AttackSession, case: Case, plan: Plan, client: int, rows: RowLog) -> None:
    """Write the rows of one client that are not there yet."""
    victims, subject, ids = case.victims, Subject(case.built), case.victims.ids(client)
    lines = {
        (n, name): victims.case(subject, case.defense, case.setting.name, name, attack.parameters(), round=n)
        for n, attacks in plan.items()
        for name, attack in attacks.items()
    }
    if all(rows.done(line, ids) for line in lines.values()):
        return
    clients, originals = victims.decode([client])
    score = session.scorer(case.built.patch_size)
    for number, history in _histories(options, case, clients, originals):
        for name, attack in plan.get(number, {}).items():
            line = lines[number, name]
            if not rows.done(line, ids):
                one = run_attack(attack, name, history, originals, score, weights_granted=True)
                row = one.row(line, ids[0], history[-1].gradient_norm())
                row["details"] = {**row["details"], "vouched_right": vouched_right(one, originals, case.built)}
                rows.append({**session.columns, **row})


def vouched_right(scored: Scored, originals: Tensor, built: BuiltModel) -> float:
    """Share of an image's patches that the attack vouches for and that are right; 0 without an image or a claim."""
    if scored.images is None or scored.known is None:
        return 0.0
    side = built.patch_size
    right = patch_recovery(_cut(scored.images, side), _cut(originals, side), side)  # (N,), 0 or 1 each
    claimed = _cut(scored.known.to(right.device).float(), side).amin(dim=(1, 2, 3))
    return float((right * claimed).mean())


def _cut(images: Tensor, side: int) -> Tensor:
    """(1, C, H, W) into its patches, (N, C, side, side)."""
    return images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def _histories(options: Options, case: Case, clients: list[int], originals) -> Iterator[tuple[int, list[Observation]]]:
    """(number of updates, all of them, the last one whole) of one client, one update after the other."""
    victims, history = case.victims, []
    for number in range(1, max(options.updates) + 1 if clients else 1):
        built = case.model(number, options)
        seen = victims.seen(built, case.setting, clients, originals, update=number - 1)
        labels = victims.labels(built, clients)
        history += observe_groups(built, seen, labels, 1, victims.defense.loss_weights())
        yield number, history
        history[-1] = remember(history[-1])
