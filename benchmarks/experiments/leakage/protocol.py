"""The leakage table: every attack on every model, block and setting, one image a client.

The April block is that of the `breaching` package (no norm, no residual), for which APRIL's closed form is exact.
Settings, threat models and what the paper leaves open: `options.Options`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from attacks import ATTACKS, Capability, ThreatModel
from experiments.leakage.options import Options
from experiments.leakage.render import ACCURACY, LEAKAGE, known_accuracies, rendered_table
from experiments.leakage.table import leakage_text
from experiments.rendering import read_rows
from experiments.session import AttackSession
from fedmjp.audit.campaign import Campaign, run_attacks
from fedmjp.audit.harness import scorer
from fedmjp.audit.strongest import gains_over_guesses, ranked
from fedmjp.audit.victims import Setting, Subject, Victims, by_input, grant_token_gradient, lacks_positions
from fedmjp.budgets import ALL, AUTO, build_attack
from fedmjp.data import load_gallery
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records.files import write_whole
from fedmjp.records.rows import BASELINES, RowLog
from fedmjp.report import Panel, Reconstructed, reconstructions_figure

SETTINGS = (
    Setting("a", defended=False, hidden=False, against="seen"),
    Setting("b", defended=True, hidden=True, against="seen"),
    Setting("c", defended=True, hidden=False, against="seen"),
    Setting("d", defended=True, hidden=True, against="original"),
)
PICTURED = 4  # photographs in a figure of reconstructions
MOST_PICTURED = 6  # models in it
PICTURE_DPI = 120  # noise does not compress: at 200 the figure takes 6 MB


def build_subjects(options: Options, model: str, source: str, seed: int) -> Iterator[Subject]:
    """A model on each block, and without position embeddings also with the token gradient granted."""
    classes = classes_of(model, source) or IMAGENET_CLASSES
    for block in options.block:
        built = build_model(model, num_classes=classes, weights=source, block=block, seed=seed)
        extra = {Capability.MODIFIED_MODEL} if block == "april" else set()
        granted = ThreatModel(ThreatModel.parse(options.grants).grants | extra)
        yield Subject(built, granted, options.precision)
        if lacks_positions(built):
            more = ThreatModel(granted.grants | {Capability.TOKEN_GRADIENT})
            yield Subject(grant_token_gradient(built), more, options.precision)


def settings_of(subject: Subject) -> list[Setting]:
    """All settings, without (c) where the model has no unknown position embedding to leave out."""
    return [s for s in SETTINGS if s.name != "c" or subject.built.hides_positions]


def label(subject: Subject) -> str:
    """The subject's name in progress lines and pictures."""
    return subject.built.name + (" + dL/dz" if Capability.TOKEN_GRADIENT in subject.threat_model.grants else "")


def strongest_first(rows: pd.DataFrame, block: str, models: Sequence[str], asked: Callable[[str], bool]) -> list[str]:
    """Attacks that returned an image on undefended clients (setting a) of these models, by `verdict.ranked`.

    Args:
        rows: as `load_rows` gives them, guesses among them.
        asked: whether an attack of this name is to be compared.
    """
    own = rows[rows["setting"] == SETTINGS[0].name]
    guesses = own[own["attack"].isin(BASELINES)]
    attacked = own[(own["block"] == block) & own["model"].isin(models) & own["attack"].map(asked)]
    lines = attacked.groupby(["model", "weights", "precision"], sort=False)
    gains = [gains_over_guesses(pd.concat([line, guesses])) for _, line in lines]
    return ranked(pd.concat(gains, ignore_index=True)) if gains else []


def run(options: Options, console: Console) -> None:
    """Attack, measure accuracies, write tables and figures."""
    Run(options, console)()


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console, self.session = options, console, AttackSession(options, console)
        self.defense = options.chosen_defense()

    def __call__(self) -> None:
        """Attack, measure accuracies, write tables and figures."""
        with self.session.rows(self.defense) as rows:
            subjects = self.attack(rows)
        self.note_accuracies(subjects)
        self.session.finish("april_attack", LEAKAGE)
        table = rendered_table(self.options.out)
        for block in dict.fromkeys(s.built.block for s in subjects):
            self.picture([s for s in subjects if s.built.block == block])
            self.console.print(leakage_text(table, block))
        self.session.require_all()

    def attack(self, rows: RowLog) -> list[Subject]:
        """Write every row that is missing; returns the subjects of the first seed."""
        subjects = []
        with self.session.bar() as bar:
            for seed in self.options.seeds:
                for model, source in self.options.sources().items():
                    for subject in build_subjects(self.options, model, source, seed):
                        self.attack_one(subject, seed, rows, bar)
                        subjects += [subject] if seed == self.options.seeds[0] else []
        return subjects

    def attack_one(self, subject: Subject, seed: int, rows: RowLog, bar: Progress) -> None:
        """Write one model's rows and print each attack's mean PSNR."""
        built, settings, found = subject.built, settings_of(subject), defaultdict(list)
        victims = self.victims(self.options.images, built.image_size, seed)
        title = f"{label(subject)}, {built.block} block"
        task = bar.add_task(title, total=len(victims) * (len(by_input(settings)) + 1))

        def on_batch(count: int, psnr: Mapping[str, list[float]]) -> None:
            bar.advance(task, count)
            for name, values in psnr.items():
                found[name] += [v for v in values if v == v]

        campaign = Campaign(
            victims,
            defense=self.options.defense,
            attacks={},
            rows=rows,
            columns=self.session.columns,
            score_images=self.session.scorer(built.patch_size),
            batch_size=self.options.batch_size,
            on_batch=on_batch,
            workers=self.options.worker_config(),
        )
        for alike in by_input(settings):
            views = victims.sample(subject, alike[0])
            campaign.attacks = self.session.suite(self.options.attacks, views, subject.threat_model) if views else {}
            campaign.attack(subject, alike)
        campaign.baselines(SETTINGS[0].name)
        bar.remove_task(task)
        means = "  ".join(f"{n} {fmean(v):.1f} dB" if v else f"{n} –" for n, v in found.items())
        self.console.print(f"{title}: {means or 'every row was there'}", highlight=False)

    def victims(self, images: str, size: int, seed: int, limit: int | None = None) -> Victims:
        """The clients that hold `images`."""
        path = self.options.data_path if images == self.options.images else None
        gallery = load_gallery(images, size=size, limit=limit or self.options.num_images, path=path)
        return self.session.victims(gallery, self.defense, seed)

    def note_accuracies(self, subjects: list[Subject]) -> None:
        """Add the accuracy of trained models, in per cent, to accuracy.csv, which keeps those of earlier calls."""
        o, found = self.options, known_accuracies(self.options.out)
        trained = [s for s in subjects if "NOT TRAINED" not in s.built.provenance]
        for subject in trained if o.accuracy_data else []:
            built, limit = subject.built, o.accuracy_images
            gallery = load_gallery(o.accuracy_data, size=built.image_size, limit=limit, path=o.accuracy_path)
            victims = self.session.victims(gallery, self.defense, o.seeds[0])
            for setting in settings_of(subject):
                key = (built.name, built.provenance, built.block, setting.name)
                found[key] = 100 * victims.accuracy(subject, setting, o.batch_size)
        if found:
            lines = pd.DataFrame([(*key, value) for key, value in found.items()], columns=ACCURACY)
            write_whole(o.out / "accuracy.csv", lines.to_csv(index=False).encode())

    def picture(self, subjects: list[Subject]) -> None:
        """Draw reconstructions of the embedded photographs on one block, in the manner of the paper's Figure 5.

        Settings (a) and (b) have a figure each.

        The paper's attack on the paper's block, the strongest on the other.
        """
        block = subjects[0].built.block
        shown = [subject for subject in subjects if not lacks_positions(subject.built)]  # the table says why
        names = strongest_first(read_rows(self.options.out), block, [s.built.name for s in shown], self.asked)
        if not names:
            return  # no attack gave an image, and the table says why
        name = "april" if block == "april" and self.asked("april") else names[0]
        for setting in SETTINGS[:2]:
            self.draw(name, setting, shown[:MOST_PICTURED])

    def asked(self, name: str) -> bool:
        """Whether this call asked for the attack `name`."""
        return name in ATTACKS and bool({AUTO, ALL, name} & set(self.options.attacks))

    def draw(self, name: str, setting: Setting, subjects: list[Subject]) -> None:
        """Draw what one attack makes of the embedded photographs in one setting, a column a model on the same block."""
        attack, panels = {name: build_attack(name, self.options.attack_settings().get(name))}, []
        for subject in subjects:
            victims = self.victims("photos", subject.built.image_size, self.options.seeds[0], limit=PICTURED)
            clients, originals = victims.decode(range(PICTURED), subject.dtype)
            if not panels:
                seen = victims.seen(subject.built, setting, clients, originals).images
                names = [victims.gallery.images.ids[c].split("/")[0] for c in clients]
                panels += [Panel(n.replace("_", " "), o, s) for n, o, s in zip(names, originals, seen, strict=True)]
            score_images = scorer(subject.built.patch_size, None)
            found = run_attacks(victims, subject, [setting], clients, originals, attack, score_images)
            for panel, (_, one) in zip(panels, found[setting, name], strict=True):
                image = None if one.images is None else one.images[0]
                panel.reconstructions[label(subject)] = Reconstructed(image, one.records[0]["psnr"], one.diagnosis)
        block, defended = subjects[0].built.block, "defended" if setting.defended else "undefended"
        title = f"{name}, {block} block, setting ({setting.name}): {defended} clients"
        path = self.options.out / f"reconstructions_{block}_{setting.name}.png"
        reconstructions_figure(panels, path, seen_title="input", title=title, dpi=PICTURE_DPI)
