"""Closed forms on messages of low precision; the protocol stands in `options.Options`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from attacks import Attack, Observation, find_tokenizer
from attacks.fingerprints import repair
from attacks.registry import UsageError
from experiments.message_precision.bounds import LARGEST, least_error, least_error_of_message, psnr_of
from experiments.message_precision.options import DECAYED, RETURNED, Options
from experiments.message_precision.precisions import has_memory, is_sparse, send
from experiments.message_precision.render import BOUND, KNOWN, MESSAGE_PRECISION, NORMAL, PLAIN
from experiments.session import TableRun
from fedmjp.audit.harness import Scored, run_attack
from fedmjp.audit.per_image import observe_groups
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.budgets import build_attack
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import METRIC_DIRECTIONS
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog

MASKED = Setting("masked", defended=True, hidden=True, against="original")
UNDEFENDED = ("patch_embedding", "token_span", "sparse_rounds", "gauss_newton")
BOUNDED = ("patch_embedding", "gauss_newton")  # attacks with a bound


def run(options: Options, console: Console) -> None:
    """Attack, then write the table."""
    Run(options, console)()


class Run(TableRun):
    """One call of the benchmark."""

    program, rendering, one_seed = "message_precision", MESSAGE_PRECISION, True

    def attack(self, rows: RowLog) -> str:
        """See `TableRun.attack`."""
        for defense in ("none", "mjp"):
            names = [name for name in self.options.attacks if (name in UNDEFENDED) == (defense == "none")]
            if names:
                images = self.attack_under(defense, names, rows)
        return images

    def attack_under(self, defense: str, names: Sequence[str], rows: RowLog) -> str:
        """Write every row of one defence that is missing; returns the images' provenance."""
        o = self.options
        acting = DEFENSES.get(defense)(**({"gamma": o.gamma} if defense == "mjp" else {}))
        name = acting.model_name(o.model) if defense == "mjp" else o.model
        classes = classes_of(name, o.weights) or IMAGENET_CLASSES
        built = build_model(name, num_classes=classes, weights=o.weights, seed=o.seed, **_term(acting))
        built.module.to(self.session.device).eval()
        if o.bounds and 3 * built.image_size**2 > LARGEST:
            raise UsageError(f"--bounds: images of {built.image_size} px have more than {LARGEST} values")
        gallery = self.session.gallery(o.images, size=built.image_size, limit=o.num_images, path=o.data_path)
        victims, subject = self.session.victims(gallery, acting, o.seed), Subject(built)
        with self.session.bar() as bar:
            task = bar.add_task(f"{built.name}, {built.provenance}", total=len(victims))
            mean = victims.mean_image(1)
            for client in range(len(victims)):
                for case, one, norm in self.scored(subject, victims, client, defense, names, mean, rows):
                    rows.append({**self.session.columns, **one.row(case, victims.ids(client)[0], norm, 0)})
                bar.advance(task)
        return gallery.provenance

    def scored(
        self,
        subject: Subject,
        victims: Victims,
        client: int,
        defense: str,
        names: Sequence[str],
        mean: torch.Tensor,
        rows: RowLog,
    ) -> Iterator[tuple[dict[str, Any], Scored, float]]:
        """What is missing of one client: the case, the scored answer and the gradient's norm."""
        clients, originals = victims.decode([client])
        if not clients:
            return
        ids, score = victims.ids(client), self.session.scorer(subject.built.patch_size)
        guesses = zip(BASELINES, (mean.expand_as(originals), victims.others(clients, originals)), strict=True)
        for name, guess in guesses:
            case = victims.case(subject, defense, "no message", name, {})
            if not rows.done(case, ids):
                yield case, Scored(name, {}, None, score(guess, originals), 0.0, ""), float("nan")
        histories: dict[int, list[Observation]] = {}
        for precision, name, way, attack in self.cases(names):
            case = victims.case(subject, defense, f"{precision}, {way}", name, attack.parameters())
            if rows.done(case, ids):
                continue
            length = self.length(name, defense)
            if length not in histories:
                histories[length] = self.history(subject, victims, clients, originals, defense, length)
            o = self.options
            history = _read_part(histories[length]) if name == "sparse_rounds" else histories[length]
            sent = send(history, precision, rate=o.rate, decay=o.decay, seed=100 * o.seed + client)
            if way in (BOUND, NORMAL):
                yield case, _bound(name, way, history[-1], sent[-1], originals), sent[-1].gradient_norm()
                continue
            if way == KNOWN and precision == DECAYED:
                sent = [repair(view)[0] for view in sent]
            found = run_attack(attack, name, sent, originals, score, weights_granted=True)
            yield case, found, sent[-1].gradient_norm()

    def cases(self, names: Sequence[str]) -> Iterator[tuple[str, str, str, Attack]]:
        """Message, name of the attack, way in which it takes the message, and the attack."""
        for precision in self.options.precisions:
            for name in names:
                if _reads(name, precision):
                    yield from ((precision, name, way, attack) for way, attack in _ways(name, precision).items())
            for name in sorted({*names} & {*BOUNDED}) if self.options.bounds else ():
                yield from ((precision, name, way, build_attack(name)) for way in _bounds(name, precision))

    def length(self, name: str, defense: str) -> int:
        """How many updates an attack reads."""
        if name == "sparse_rounds":
            return self.options.sparse_updates
        return self.options.updates if defense == "mjp" else 1

    def history(
        self,
        subject: Subject,
        victims: Victims,
        clients: Sequence[int],
        originals: torch.Tensor,
        defense: str,
        length: int,
    ) -> list[Observation]:
        """So many updates of a client before anything happens to them, oldest first."""
        o, built, found = self.options, subject.built, []
        for number in range(length):
            built = drifted(built, o.drift, o.seed, number) if number else built
            seen = victims.seen(built, MASKED, clients, originals, update=number)
            terms = victims.defense.loss_weights()
            found.append(
                replace(observe_groups(built, seen, victims.labels(built, clients), 1, terms)[0], round=number)
            )
        return found


def _term(defense: Any) -> dict[str, str]:
    """The localisation term that the defence's model has."""
    return {"dal": defense.dal} if hasattr(defense, "dal") else {}


def _read_part(history: Sequence[Observation]) -> list[Observation]:
    """The updates without what `sparse_rounds` does not read; the messages that are for it choose in each tensor."""
    tokenizer = find_tokenizer(history[-1].model, history[-1].image_shape)
    names = (tokenizer.positions, tokenizer.weight, tokenizer.bias)
    return [replace(view, gradients={n: view.gradients[n] for n in names}) for view in history]


def _bound(name: str, way: str, exact: Observation, sent: Observation, originals: torch.Tensor) -> Scored:
    """The bound of the equations that an attack of `BOUNDED` uses, as a row that has an error and no image."""
    if name == "gauss_newton":
        error = least_error_of_message(sent, originals)
    else:
        error = least_error(exact, sent, originals, normal=way == NORMAL)
    record = dict.fromkeys(METRIC_DIRECTIONS, float("nan")) | {"mse": error, "psnr": psnr_of(error)}
    return Scored(name, {}, None, [record], 0.0, "")


def _bounds(name: str, precision: str) -> tuple[str, ...]:
    """The bounds of a message: of the whole one, of rounded messages of which every entry is sent."""
    if precision in ("float32", RETURNED, DECAYED) or "signs" in precision or has_memory(precision):
        return ()
    if name == "gauss_newton":
        return () if is_sparse(precision) else (BOUND,)
    return BOUND, NORMAL


def _reads(name: str, precision: str) -> bool:
    """Whether an attack is for such messages."""
    if name == "gauss_newton":
        return not has_memory(precision) and precision not in ("float32", DECAYED) and "signs" not in precision
    return is_sparse(precision) and "update" not in precision if name == "sparse_rounds" else not has_memory(precision)


def _ways(name: str, precision: str) -> dict[str, Attack]:
    """The attack without and with what the message's precision says of its errors, where that makes a difference."""
    if precision == "float32":
        return {PLAIN: build_attack(name)}
    if name in ("sparse_rounds", "gauss_newton"):
        return {KNOWN: build_attack(name)}
    if precision == DECAYED:
        return {PLAIN: build_attack(name), KNOWN: build_attack(name)}
    try:
        return {PLAIN: build_attack(name, {"intervals": False}), KNOWN: build_attack(name)}
    except UsageError:  # an attack without such a setting
        return {PLAIN: build_attack(name)}
