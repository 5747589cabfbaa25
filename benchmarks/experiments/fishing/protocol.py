"""Rounds of an active server with clients that hold a large batch; the protocol stands in `options.Options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Observation
from attacks.active.base import ActiveAttack, SendContext, Sending
from attacks.memory import remember
from experiments.fishing.batches import Labels, draw_batches
from experiments.fishing.options import Options
from experiments.fishing.pictures import batch_figure
from experiments.fishing.render import FISHING, PASSIVE
from experiments.local_steps import returned
from experiments.rendering import Rendering, read_run
from experiments.session import AttackSession
from fedmjp.audit.harness import Scored, score_found
from fedmjp.audit.victims import Setting, Subject, Victims
from fedmjp.budgets import build_attack
from fedmjp.data import load_gallery
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.build import load_at_size
from fedmjp.models.encoder import load_encoder
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog

NEVER_ASKED = "the client took part in no round, so that nothing was read"


def run(options: Options, console: Console) -> None:
    """Attack, then write tables and figures."""
    Run(options, console)()


@dataclass(frozen=True)
class Answer:
    """What an attack or a guess has of one image of a client.

    Attributes:
        scored: the answer that holds it.
        norm: of the update that it is from.
        rounds: prepared rounds until then; 0 for a server that sends the model as it is.
        sure: whether the attack vouches for it.
    """

    scored: Scored
    norm: float = float("nan")
    rounds: int = 0
    sure: bool = False


@dataclass(frozen=True)
class Group:
    """The clients of whose updates the server sees the sum alone; one client where it sees every update.

    Attributes:
        numbers: of the clients among the victims, the one that is singled out first.
        images: of each client, (size, C, H, W) in [0, 1].
        scored: the images that answers are compared with, (B, C, H, W): of all, or of the one that is singled out.
        ids: theirs.
    """

    numbers: list[int]
    images: tuple[Tensor, ...]
    scored: Tensor
    ids: list[str]


class Run:
    """One call of the benchmark.

    Attributes:
        program, rendering: as `TableRun` has them.
    """

    program: ClassVar[str] = "fishing"
    rendering: ClassVar[Rendering] = FISHING

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console, self.session = options, console, AttackSession(options, console)
        self.defense = options.chosen_defense()
        name = self.defense.model_name(options.model)
        classes = classes_of(name, options.weights) or IMAGENET_CLASSES
        adapt = self.defense.adapt if self.defense.adapts else None
        size, encoder = options.image_size, options.encoder
        built = build_model(
            name,
            num_classes=classes,
            weights=options.weights,
            seed=options.seed,
            adapt=adapt,
            image_size=size if encoder is None else None,  # an encoder of either size is loaded first
        )
        if encoder is not None:
            built = load_at_size(built, size, encoder, partial(load_encoder, built.module, encoder))
        built.module.to(self.session.device).eval()
        self.built, self.shape = built, (3, built.image_size, built.image_size)
        self.gallery = load_gallery(options.images, size=built.image_size, path=options.data_path)
        self.score = self.session.scorer(built.patch_size)
        defended = options.defense != "none"
        name = "defended" if defended else "plain"
        self.setting = Setting(name, defended=defended, hidden=defended, against="original")

    def __call__(self) -> None:
        """Attack, then write tables and figures."""
        o, pictures = self.options, {}
        with self.session.rows() as rows:
            for name, labels in o.pairs():
                attack = build_attack(name, o.settings().get(name))
                for size in o.batch_sizes:
                    pictures = self.attack(name, attack, labels, size, rows) or pictures
        if pictures and o.images == "photos":
            batch_figure(pictures, o.out / "batch.png")
        before = read_run(o.out).get("images", {}) if (o.out / "run.json").is_file() else {}
        self.session.finish(self.program, self.rendering, images={**before, self.gallery.name: self.gallery.provenance})
        self.console.print(pd.read_csv(o.out / "table.csv").to_string(index=False), highlight=False)

    def attack(self, name: str, attack: ActiveAttack, labels: Labels, size: int, rows: RowLog) -> dict[str, Tensor]:
        """Write every row of one case that is missing.

        Returns:
            what was computed of the last client: originals and the answers of both servers, (size, C, H, W) in [0, 1],
            NaN where an image did not come back.
        """
        own = (self.gallery.images.labels % self.built.module.num_classes).tolist()
        o = self.options
        drawn = draw_batches(own, size, labels, o.clients * o.sum_of, o.seed)
        images = self.gallery.images.subset([index for batch in drawn for index in batch])
        held = replace(self.gallery, images=images)
        self.session.check_images(held)
        victims = self.session.victims(held, self.defense, o.seed, size)
        pictures: dict[str, Tensor] = {}
        with self.session.bar() as bar:
            task = bar.add_task(f"{name}, {size} {labels} labels", total=o.clients * self.rounds(size))
            for first in range(0, len(drawn), o.sum_of):
                group = self.group(victims, first, attack.single_out)
                cases = {
                    n: self.case(victims, labels, n, attack, len(group.scored)) for n in (*BASELINES, PASSIVE, name)
                }
                if all(rows.done(case, group.ids) for case in cases.values()):
                    bar.advance(task, self.rounds(size))
                    continue
                found = self.passive(victims, group)
                found[name] = self.fished(victims, group, name, attack, lambda: bar.advance(task))
                self.write(group, cases, found, rows)
                pictures = {"original": group.scored}
                pictures |= {n: _pictures(found[n], group.scored) for n in (PASSIVE, name)}
        return pictures

    def group(self, victims: Victims, first: int, single_out: bool) -> Group:
        """The clients from `first` on whose updates are summed."""
        numbers = list(range(first, first + self.options.sum_of))
        images = victims.decode(numbers)[1].split(victims.group)
        scored = numbers[:1] if single_out else numbers
        ids = [name for number in scored for name in victims.ids(number)]
        return Group(numbers, images, torch.cat(images[: len(scored)]), ids)

    def rounds(self, size: int) -> int:
        """Rounds with a client of so many images, at most."""
        return self.options.rounds or size + 1

    def passive(self, victims: Victims, group: Group) -> dict[str, list[Answer]]:
        """The guesses without a gradient, and the closed form on an update of the model as it is, by name and image."""
        view, originals = self.update(victims, group, Sending({}), 0), group.scored
        reader = ATTACKS.get(PASSIVE)()
        one = score_found(reader, PASSIVE, [reader([view])], [originals], self.score)[0]
        own = group.numbers[: len(originals) // victims.group]
        guesses = (victims.mean_image(1).expand_as(originals), victims.others(own, originals))
        found = {PASSIVE: Answer(one, view.gradient_norm())}
        for guess, images in zip(BASELINES, guesses, strict=True):
            found[guess] = Answer(Scored(guess, {}, images, self.score(images, originals), 0.0, ""))
        return {guess: [answer] * len(originals) for guess, answer in found.items()}

    def fished(
        self, victims: Victims, group: Group, name: str, attack: ActiveAttack, advance: Callable[[], None]
    ) -> list[Answer]:
        """What the attack has of each image after all rounds: the first answer that it vouches for, else the first."""
        module, history = self.built.module, list[Observation]()
        best: dict[int, Answer] = {}
        originals, answer = group.scored, None
        for number in range(1, self.rounds(len(originals)) + 1):
            if not self.options.takes_part(group.numbers[0], number):
                advance()
                continue
            context = SendContext(module, self.shape, self.built.mean, self.built.std, history)
            silent = attack.sent_to(context, 1) if attack.single_out else None
            view = self.update(victims, group, attack.sent_to(context), number, silent)
            one = score_found(attack, name, [attack([*history, view])], [originals], self.score)[0]
            for image, record in enumerate(one.records):
                answer = Answer(one, view.gradient_norm(), number, sure=not one.diagnosis or vouched(one, image))
                present = best.get(image)
                if record["psnr"] == record["psnr"] and (present is None or (answer.sure and not present.sure)):
                    best[image] = answer
            history.append(remember(view, attack.remembered_layers(view.model, self.shape)))
            advance()
            if sum(answer.sure for answer in best.values()) == len(originals):
                break
        if answer is None:
            answer = Answer(Scored(name, attack.parameters(), None, self.score(originals, originals), 0.0, NEVER_ASKED))
        absent = _absent(answer, originals, self.rounds(len(originals)))
        return [best.get(image, absent) for image in range(len(originals))]

    def update(
        self,
        victims: Victims,
        group: Group,
        sending: Sending,
        number: int,
        silent: Sending | None = None,
    ) -> Observation:
        """What the server sees of the group in a round.

        Args:
            sending: what clients are sent instead of the model.
            silent: what all but the first are sent, whose update the sum then is; else it is the mean over all.
        """
        built = self.built
        models = [replace(built, module=own.model(built.module, self.shape)) for own in (sending, silent or sending)]
        pairs = enumerate(zip(group.numbers, group.images, strict=True))
        views = [self.single(models[min(place, 1)], victims, *own, number) for place, own in pairs]
        share = 1.0 if silent else 1.0 / len(views)
        if len(views) == 1:
            return views[0]
        total = {name: sum(view.gradients[name] for view in views) * share for name in views[0].gradients}
        images = views[0].num_examples * (1 if silent else len(views))
        return replace(views[0], gradients=total, num_examples=images)

    def single(self, built: BuiltModel, victims: Victims, client: int, images: Tensor, number: int) -> Observation:
        """One client's update of a round."""
        o = self.options
        if o.epochs:
            size, labels = o.minibatch or len(images), victims.labels(built, [client])
            batches = list(zip(images.split(size), labels.split(size), strict=True)) * o.epochs
            make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[o.optimizer]
            return returned(built, batches, make, o.learning_rate)
        seen = victims.seen(built, self.setting, [client], images, number)
        if not self.setting.defended:
            return victims.observe(built, seen, [client], ())[0]
        return victims.observe(built, seen, [client], (), self.defense.loss_weights(), number)[0]

    def case(self, victims: Victims, labels: Labels, name: str, attack: ActiveAttack, images: int) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`), where answers are compared with so many images."""
        o, passive = self.options, name in (*BASELINES, PASSIVE)
        parameters = {} if passive else attack.parameters()
        subject = Subject(self.built, o.threat_model(None if passive else attack))
        setting = f"{labels} labels{o.circumstances(attack.single_out)}"
        case = victims.case(subject, o.defense, setting, name, parameters, round=self.rounds(images))
        steps = o.epochs * -(-victims.group // (o.minibatch or victims.group))
        trained = {"update": "weights", "local_steps": steps} if o.epochs else {}
        grants = sorted({*case["threat_model"], *(["aggregate_only"] if o.sum_of > 1 else [])})
        return case | trained | {"batch_size": images, "threat_model": grants}

    def write(
        self,
        group: Group,
        cases: Mapping[str, Mapping[str, Any]],
        found: Mapping[str, list[Answer]],
        rows: RowLog,
    ) -> None:
        """Write the rows of one group; `details` holds the rounds until the image came back, and whether the attack
        vouches for all of it."""
        for name, answers in found.items():
            for place, (image_id, answer) in enumerate(zip(group.ids, answers, strict=True)):
                if not rows.done(cases[name], [image_id]):
                    row = answer.scored.row(cases[name], image_id, answer.norm, place)
                    row["details"] = {
                        **row["details"],
                        "rounds": answer.rounds,
                        "vouched": vouched(answer.scored, place),
                    }
                    rows.append({**self.session.columns, **row})


def _absent(last: Answer, originals: Tensor, rounds: int) -> Answer:
    """The answer for an image that never came back in so many rounds."""
    nothing = torch.full_like(originals, float("nan"))
    reason = last.scored.diagnosis or f"the image did not come back within {rounds} rounds"
    records = [dict.fromkeys(record, float("nan")) for record in last.scored.records]
    return replace(last, rounds=rounds, scored=replace(last.scored, images=nothing, records=records, diagnosis=reason))


def vouched(scored: Scored, image: int) -> bool:
    """Whether an attack vouches for every pixel of one image of the batch."""
    known = scored.known
    return known is not None and image < len(known) and bool(known[image].all())


def _pictures(answers: list[Answer], originals: Tensor) -> Tensor:
    """The images of a client's answers, (B, C, H, W); NaN where there is none."""
    nothing = torch.full_like(originals, float("nan"))
    return torch.stack([(nothing if a.scored.images is None else a.scored.images)[i] for i, a in enumerate(answers)])
