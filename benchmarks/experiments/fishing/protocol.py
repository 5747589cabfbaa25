"""Rounds of an active server with clients that hold a large batch; the protocol stands in `options.Options`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from attacks import ATTACKS, Observation
from attacks.active.base import ActiveAttack, Sending
from attacks.memory import remember
from experiments.fishing.batches import Labels, draw_batches
from experiments.fishing.options import Options
from experiments.fishing.pictures import batch_figure
from experiments.fishing.render import FISHING, PASSIVE
from experiments.rendering import Rendering, read_run
from experiments.session import AttackSession
from fedmjp.audit.harness import Scored, score_found
from fedmjp.audit.victims import Setting, Subject, Victims
from fedmjp.budgets import build_attack
from fedmjp.data import load_gallery
from fedmjp.models import build_model, resize_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.rows import BASELINES, RowLog


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
        built = build_model(name, num_classes=classes, weights=options.weights, seed=options.seed, adapt=adapt)
        built = built if options.image_size is None else resize_model(built, options.image_size)
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
        before = read_run(o.out)["images"] if (o.out / "run.json").is_file() else {}
        self.session.finish(self.program, self.rendering, images={**before, self.gallery.name: self.gallery.provenance})
        self.console.print(pd.read_csv(o.out / "table.csv").to_string(index=False), highlight=False)

    def attack(self, name: str, attack: ActiveAttack, labels: Labels, size: int, rows: RowLog) -> dict[str, Tensor]:
        """Write every row of one case that is missing.

        Returns:
            what was computed of the last client: originals and the answers of both servers, (size, C, H, W) in [0, 1],
            NaN where an image did not come back.
        """
        own = (self.gallery.images.labels % self.built.module.num_classes).tolist()
        drawn = draw_batches(own, size, labels, self.options.clients, self.options.seed)
        images = self.gallery.images.subset([index for batch in drawn for index in batch])
        victims = self.session.victims(replace(self.gallery, images=images), self.defense, self.options.seed, size)
        pictures: dict[str, Tensor] = {}
        with self.session.bar() as bar:
            task = bar.add_task(f"{name}, {size} {labels} labels", total=len(drawn) * self.rounds(size))
            for client in range(len(drawn)):
                cases = {n: self.case(victims, labels, n, attack) for n in (*BASELINES, PASSIVE, name)}
                if all(rows.done(case, victims.ids(client)) for case in cases.values()):
                    bar.advance(task, self.rounds(size))
                    continue
                _, originals = victims.decode([client])
                found = self.passive(victims, client, originals)
                found[name] = self.fished(victims, client, originals, name, attack, lambda: bar.advance(task))
                self.write(victims, client, cases, found, rows)
                pictures = {"original": originals} | {n: _pictures(found[n], originals) for n in (PASSIVE, name)}
        return pictures

    def rounds(self, size: int) -> int:
        """Rounds with a client of so many images, at most."""
        return self.options.rounds or size + 1

    def passive(self, victims: Victims, client: int, originals: Tensor) -> dict[str, list[Answer]]:
        """The guesses without a gradient, and the closed form on an update of the model as it is, by name and image."""
        view = self.update(victims, client, originals, Sending({}), 0)
        reader = ATTACKS.get(PASSIVE)()
        one = score_found(reader, PASSIVE, [reader([view])], [originals], self.score)[0]
        guesses = (victims.mean_image(1).expand_as(originals), victims.others([client], originals))
        found = {PASSIVE: Answer(one, view.gradient_norm())}
        for guess, images in zip(BASELINES, guesses, strict=True):
            found[guess] = Answer(Scored(guess, {}, images, self.score(images, originals), 0.0, ""))
        return {guess: [answer] * len(originals) for guess, answer in found.items()}

    def fished(
        self,
        victims: Victims,
        client: int,
        originals: Tensor,
        name: str,
        attack: ActiveAttack,
        advance: Callable[[], None],
    ) -> list[Answer]:
        """What the attack has of each image after all rounds: the first answer that it vouches for, else the first."""
        module, history = self.built.module, list[Observation]()
        normalisation = {"mean": self.built.mean, "std": self.built.std}
        best: dict[int, Answer] = {}
        for number in range(1, self.rounds(len(originals)) + 1):
            sending = attack.send(module, self.shape, history, **normalisation)
            view = self.update(victims, client, originals, sending, number)
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
        return [best.get(image, _absent(answer, originals)) for image in range(len(originals))]

    def update(self, victims: Victims, client: int, originals: Tensor, sending: Sending, number: int) -> Observation:
        """The client's update of a round, of the model that it is sent."""
        built = replace(self.built, module=sending.model(self.built.module, self.shape))
        seen = victims.seen(built, self.setting, [client], originals, number)
        if not self.setting.defended:
            return victims.observe(built, seen, [client], ())[0]
        return victims.observe(built, seen, [client], (), self.defense.loss_weights(), number)[0]

    def case(self, victims: Victims, labels: Labels, name: str, attack: ActiveAttack) -> dict[str, Any]:
        """The values that identify a row (`records.rows.CASE`)."""
        passive = name in (*BASELINES, PASSIVE)
        parameters = {} if passive else attack.parameters()
        subject = Subject(self.built, self.options.threat_model(None if passive else attack))
        setting = f"{labels} labels"
        return victims.case(subject, self.options.defense, setting, name, parameters, round=self.rounds(victims.group))

    def write(
        self,
        victims: Victims,
        client: int,
        cases: Mapping[str, Mapping[str, Any]],
        found: Mapping[str, list[Answer]],
        rows: RowLog,
    ) -> None:
        """Write the rows of one client; `details` holds the rounds until the image came back, and whether the attack
        vouches for all of it."""
        for name, answers in found.items():
            for place, (image_id, answer) in enumerate(zip(victims.ids(client), answers, strict=True)):
                if not rows.done(cases[name], [image_id]):
                    row = answer.scored.row(cases[name], image_id, answer.norm, place)
                    row["details"] = {
                        **row["details"],
                        "rounds": answer.rounds,
                        "vouched": vouched(answer.scored, place),
                    }
                    rows.append({**self.session.columns, **row})


def _absent(last: Answer, originals: Tensor) -> Answer:
    """The answer for an image that never came back."""
    nothing = torch.full_like(originals, float("nan"))
    reason = last.scored.diagnosis or f"the image did not come back within {last.rounds} rounds"
    records = [dict.fromkeys(record, float("nan")) for record in last.scored.records]
    return replace(last, scored=replace(last.scored, images=nothing, records=records, diagnosis=reason))


def vouched(scored: Scored, image: int) -> bool:
    """Whether an attack vouches for every pixel of one image of the batch."""
    known = scored.known
    return known is not None and image < len(known) and bool(known[image].all())


def _pictures(answers: list[Answer], originals: Tensor) -> Tensor:
    """The images of a client's answers, (B, C, H, W); NaN where there is none."""
    nothing = torch.full_like(originals, float("nan"))
    return torch.stack([(nothing if a.scored.images is None else a.scored.images)[i] for i, a in enumerate(answers)])
