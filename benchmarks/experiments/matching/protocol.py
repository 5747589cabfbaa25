"""Gradient matching and closed forms on clients with one image or several, without a defence and under one.

What is compared, and with how many steps: `options.Options`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from torch import Tensor

from attacks import UsageError
from experiments.matching.options import Options
from experiments.matching.render import rendered_table, rendering
from experiments.rendering import read_rows
from experiments.session import AttackSession
from fedmjp.audit.campaign import Campaign, run_attacks
from fedmjp.audit.harness import scorer
from fedmjp.audit.victims import NO_MODEL, Setting, Subject, Victims
from fedmjp.data import Gallery, load_gallery
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.models import build_model
from fedmjp.models.weights import classes_of
from fedmjp.records.rows import RowLog
from fedmjp.report import Panel, Reconstructed, reconstructions_figure
from fedmjp.report.flags import footnotes, with_table_flags

SHOWN = ["defense", "gamma", "batch_size", "setting", "attack", "init", "steps", "psnr_mean", "gain_mean", "verdict"]
MEAN_OF = 128  # images behind the mean image, at most
PLAIN = Setting("original", defended=False, hidden=False, against="original")
DEFENDED = (
    Setting("original", defended=True, hidden=True, against="original"),
    Setting("seen", defended=True, hidden=True, against="seen"),
)


@dataclass(frozen=True)
class Cell:
    """Clients of one kind: model, defence, batch."""

    model: str
    defense: str
    options: Defense
    settings: tuple[Setting, ...]
    batch: int

    @property
    def title(self) -> str:
        """For a line of progress."""
        gamma = f" {self.options.gamma}" if hasattr(self.options, "gamma") else ""
        return f"{self.model}, {self.defense}{gamma}, batch {self.batch}"


def cells(options: Options) -> Iterator[Cell]:
    """Every kind of client that is asked for."""
    for batch in options.batches:
        yield Cell(options.model, "none", DEFENSES.get("none")(), (PLAIN,), batch)
        for defense in options.sweep(options.gammas) if options.defense != "none" else ():
            if hasattr(defense, "dal"):  # the clients' loss is the cross-entropy alone
                defense = replace(defense, dal="none")
            yield Cell(options.model, options.defense, defense, DEFENDED, batch)


def run(options: Options, console: Console) -> None:
    """Attack, then write table and figures."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console, self.session = options, console, AttackSession(options, console)

    def __call__(self) -> None:
        """Attack, then write table and figures."""
        o, out = self.options, self.options.out
        with self.session.rows() as rows:
            others = {r["model"] for r in rows.rows()} - {cell.options.model_name(o.model) for cell in cells(o)}
            others -= {o.model, f"{o.model}_mjp", NO_MODEL}
            if others:
                raise UsageError(f"{out} holds rows of {others.pop()}; pass another --out for {o.model}")
            self.attack(rows)
        warnings = footnotes(with_table_flags(read_rows(out)))
        self.session.finish("gradient_matching", rendering("gradient_matching"), warnings=warnings)
        if o.pictures:
            self.picture()
        self.console.print(rendered_table(out)[SHOWN].round(2).to_string(index=False), highlight=False)
        for line in warnings:
            self.console.print(line, highlight=False)
        self.session.require_all()

    def attack(self, rows: RowLog) -> None:
        """Write every row that is missing."""
        mean = self.mean_image()
        with self.session.bar() as bar:
            for cell in cells(self.options):
                subject, victims = self.subject(cell), self.victims(cell)
                task, search = bar.add_task(cell.title, total=None), bar.add_task("loss", total=None)

                def on_step(done: int, steps: int, loss: Tensor, search=search) -> None:
                    bar.update(search, completed=done, total=steps, description=f"mean loss {float(loss.mean()):.3g}")

                budgets = list(self.options.steps)
                bar.update(task, total=len(budgets) * len(victims))
                # Another process must leave the bar alone: its thread and its lock are this one's.
                shown = None if self.options.spread else on_step
                for steps in budgets:
                    campaign = Campaign(
                        victims,
                        defense=cell.defense,
                        attacks=self.options.build_attacks(steps, shown),
                        rows=rows,
                        columns=self.session.columns,
                        score_images=self.session.scorer(subject.built.patch_size),
                        batch_size=max(1, self.options.together // cell.batch),
                        on_batch=lambda count, psnr, task=task: bar.advance(task, count),
                        workers=self.options.worker_config(),
                    )
                    campaign.attack(subject, cell.settings)
                    if cell.defense == "none":
                        campaign.baselines(PLAIN.name, mean)
                bar.remove_task(task)
                bar.remove_task(search)
                self.console.print(f"{cell.title}: done", highlight=False)

    def subject(self, cell: Cell) -> Subject:
        """The model that the cell's clients are sent."""
        o, name = self.options, cell.options.model_name(cell.model)
        classes = classes_of(cell.model, o.weights) or len(self.gallery().images.classes)
        built = build_model(
            name, num_classes=classes, weights=o.weights, dal="none", seed=o.seed, image_size=o.image_size
        )
        return Subject(built)

    def gallery(self) -> Gallery:
        """The images, at the model's size."""
        o = self.options
        return load_gallery(o.images, size=o.pixels(), limit=o.num_images, path=o.data_path)

    def mean_image(self) -> Tensor:
        """Mean of the set's images, (1, C, H, W): of more than are attacked, or it would show them."""
        o = self.options
        gallery = load_gallery(o.images, size=o.pixels(), limit=MEAN_OF, path=o.data_path)
        every = self.session.victims(gallery, DEFENSES.get("none")(), o.seed)
        return every.mean_image(batch_size=32)

    def victims(self, cell: Cell) -> Victims:
        """The cell's clients."""
        return self.session.victims(self.gallery(), cell.options, self.options.seed, cell.batch)

    def picture(self) -> None:
        """Draw embedded photographs, alone in their batch, without a defence, under the largest number of steps."""
        o = self.options
        cell = Cell(o.model, "none", DEFENSES.get("none")(), (PLAIN,), 1)
        subject = self.subject(cell)
        gallery = load_gallery("photos", size=subject.built.image_size, limit=o.pictures)
        victims = self.session.victims(gallery, cell.options, o.seed)
        clients, originals = victims.decode(range(len(victims)))
        score_images = scorer(subject.built.patch_size, None)
        attacks = o.build_attacks(max(o.steps))
        found = run_attacks(victims, subject, [PLAIN], clients, originals, attacks, score_images)
        panels = []
        for index, client in enumerate(clients):
            panel = Panel(victims.ids(client)[0].split("/")[0].replace("_", " "), originals[index], originals[index])
            for name in attacks:
                one = found[PLAIN, name][index][1]
                image = None if one.images is None else one.images[0]
                panel.reconstructions[name] = Reconstructed(image, one.records[0]["psnr"], one.diagnosis)
            panels.append(panel)
        title = f"{cell.model}, batch 1, no defence, {max(o.steps)} steps"
        reconstructions_figure(panels, o.out / "reconstructions.png", seen_title="input", title=title, dpi=120)
