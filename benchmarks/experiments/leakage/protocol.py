"""Reproduce the leakage table of the MJP paper (Table 5), on the paper's own block and on the one people train.

    python benchmarks/april_attack.py                          every model, on the embedded photographs
    python benchmarks/april_attack.py --model deit_s_mjp       that model's rows
    python benchmarks/april_attack.py --images DIR --num-images 200 --weights random vit_ti=FILE.safetensors

Settings: (a) the original image is the input; (b) the input is masked and jigsawed, and the reconstruction is held
against that input; (c) as (b) without the unknown position embedding (models that have one); (d) as (b), held against
the original image.

The april block (no norm, no residual) is the paper's protocol, that of the `breaching` package; standard is the block
as people train it. The client's loss is the cross-entropy alone, as there.

A model without position embeddings sends no gradient per token, so there is nothing to solve with, and its row says so.
How the paper got its figures for such a model is not stated. A second row grants the server that gradient all the same
(threat model `token_gradient`): as if a position embedding fixed at zero were trained and sent.

Writes rows.jsonl.gz, table.csv, table_BLOCK.tex and .md, condition.png, reconstructions_BLOCK.png and run.json to
--out; --resume goes on with an unfinished run, or adds models, attacks and images to a finished one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import pandas as pd
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attacks import ATTACKS, Capability, ThreatModel, UsageError
from experiments.leakage.table import leakage_table, leakage_text, write_leakage
from fedmjp.audit.campaign import Campaign, answers
from fedmjp.audit.harness import scorer
from fedmjp.audit.victims import Setting, Subject, Victims, by_input, grant_token_gradient, lacks_positions
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import load_lpips
from fedmjp.models import build_model, split_name
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of, shipped_names
from fedmjp.records import provenance
from fedmjp.records.rows import pack_rows, unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.report import Panel, Reconstructed, RowLog, load_rows, reconstructions_figure

HERE = Path(__file__).resolve().parents[2]
PAPER = HERE / "paper" / "mjp_table5.csv"
PAPER_MODELS = ("vit_s", "deit_s", "deit_s_nope", "deit_s_mjp")
SETTINGS = (
    Setting("a", defended=False, hidden=False, against="seen"),
    Setting("b", defended=True, hidden=True, against="seen"),
    Setting("c", defended=True, hidden=False, against="seen"),
    Setting("d", defended=True, hidden=True, against="original"),
)
ACCURACY = ["model", "weights", "block", "setting", "accuracy"]
PICTURED = 4  # photographs in the figure of reconstructions
PICTURE_DPI = 120  # noise does not compress: at 200 the figure takes 6 MB


@dataclass(frozen=True)
class Options:
    """Leakage of Vision Transformers under closed-form attacks, in the layout of the MJP paper's Table 5."""

    model: tuple[str, ...] = ()
    """Models to attack (none given: vit_s, deit_s, deit_s_nope, deit_s_mjp, every checkpoint that ships, and every
    model named in --weights)."""
    weights: tuple[str, ...] = ("auto",)
    """SOURCE for every model, or MODEL=SOURCE for one; a source is random, timm, auto (shipped weights, else random),
    or a checkpoint's path."""
    block: tuple[Literal["april", "standard"], ...] = ("april", "standard")
    """First block: the paper's (april) or the one people train (standard)."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Attacks, from: {', '.join(ATTACKS)}.")] = (
        "april",
        "patch_embedding",
    )
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name (its test images)."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int | None = 24
    """Most images (None: all of them)."""
    gamma: float = 0.9
    """Share of patches that are masked and jigsawed in settings (b), (c) and (d)."""
    seeds: tuple[int, ...] = (0,)
    """Each fixes random weights, masks and jigsaws; a table's figures are means over them."""
    precision: Literal["float32", "float64"] = "float32"
    """Type of weights and gradients. float64 shows what round-off hides: clients send float32."""
    grants: tuple[str, ...] = tuple(sorted(c.value for c in ThreatModel().grants))
    """What the adversary sees beyond an update; an attack that needs more is refused."""
    accuracy_data: str | None = None
    """Data set whose labels the checkpoints were trained for: fills the accuracy column of trained models."""
    accuracy_path: Path | None = None
    """Local copy of --accuracy-data."""
    accuracy_images: int = 1000
    """Test images behind an accuracy."""
    lpips_net: Literal["squeeze", "alex", "vgg"] = "squeeze"
    """Backbone of LPIPS."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS; without it and without a cached backbone the column stays empty."""
    batch_size: int = 16
    """Clients a pass; halved when memory runs out."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    out: Path = Path("runs/april_attack")
    """Folder of rows, tables and figures (the committed ones stand in results/april_attack)."""
    resume: bool = False
    """Go on in a folder that holds rows already; rows that are there are not computed again."""

    def sources(self) -> dict[str, str]:
        """Model -> source of its weights, in the order of the table.

        Raises:
            UsageError: an unknown model.
        """
        named = dict(entry.split("=", 1) for entry in self.weights if "=" in entry)
        general = next((entry for entry in self.weights if "=" not in entry), "auto")
        models = self.model or tuple(dict.fromkeys((*PAPER_MODELS, *shipped_names(), *named)))
        for model in (*models, *named):
            split_name(model)
        return {model: named.get(model, general) for model in models}

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        self.sources()
        for name in self.attacks:
            ATTACKS.get(name)().require(ThreatModel.parse(self.grants), name)
        DEFENSES.get("mjp")(gamma=self.gamma).validate()
        for option in ("batch_size", "num_images", "accuracy_images"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"--{option.replace('_', '-')} must be at least 1, not {value}")
        if not (self.seeds and self.block and self.attacks):
            raise UsageError("--seeds, --block and --attacks each need at least one value")
        if self.out.exists() and any(self.out.glob("rows.jsonl*")) and not self.resume:
            raise UsageError(f"{self.out} holds rows already; pass --resume to go on with them, or another --out")


def line_up(options: Options, model: str, source: str, seed: int) -> Iterator[Subject]:
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
    """Setting (c) only means something where there is an unknown embedding to leave out."""
    return [s for s in SETTINGS if s.name != "c" or subject.built.hides_positions]


def label(subject: Subject) -> str:
    """The subject's name in progress lines and pictures."""
    return subject.built.name + (" + dL/dz" if Capability.TOKEN_GRADIENT in subject.threat_model.grants else "")


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        options.validate()
        self.options, self.console = options, console
        self.device = usable_device(options.device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.lpips = load_lpips(options.lpips_net, options.lpips_weights, self.device)
        self.defense = DEFENSES.get("mjp")(gamma=options.gamma)
        asked = {k: str(v) for k, v in vars(options).items() if k not in ("out", "resume", "device", "batch_size")}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}
        self.told: set[str] = set()

    def __call__(self) -> None:
        """Attack, measure accuracies, write tables and figures."""
        out = self.options.out
        unpack_rows(out / "rows.jsonl")
        with RowLog(out / "rows.jsonl") as rows:
            if rows.repaired:
                self.say("the last row was half-written: it is computed again")
            subjects = self.attack(rows)
        frame = load_rows(out / "rows.jsonl")
        if frame.empty:
            raise UsageError(f"no picture of --images {self.options.images} can be read; nothing was attacked")
        table = leakage_table(frame, self.accuracies(subjects), pd.read_csv(PAPER))
        write_leakage(table, frame, out)
        for block in dict.fromkeys(s.built.block for s in subjects):
            self.picture([s for s in subjects if s.built.block == block], table)
            self.console.print(leakage_text(table, block))
        left_out = [line for line in self.told if line.startswith("left out")]
        note_run(out, "python benchmarks/april_attack.py", frame, left_out=left_out)
        pack_rows(out / "rows.jsonl")
        self.console.print(f"tables and figures: {out}", soft_wrap=True, highlight=False)

    def say(self, line: str) -> None:
        """Tell a line, once."""
        if line not in self.told:
            self.told.add(line)
            self.console.print(line, highlight=False)

    def attack(self, rows: RowLog) -> list[Subject]:
        """Write every row that is missing; returns the subjects of the first seed."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        subjects = []
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            for seed in self.options.seeds:
                for model, source in self.options.sources().items():
                    for subject in line_up(self.options, model, source, seed):
                        self.attack_one(subject, seed, rows, bar)
                        subjects += [subject] if seed == self.options.seeds[0] else []
        return subjects

    def attack_one(self, subject: Subject, seed: int, rows: RowLog, bar: Progress) -> None:
        """One model's rows, and a line that says what came of them."""
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
            defense="mjp",
            attacks={name: ATTACKS.get(name)() for name in self.options.attacks},
            rows=rows,
            columns=self.columns,
            score_images=scorer(built.patch_size, self.lpips),
            batch_size=self.options.batch_size,
            on_batch=on_batch,
        )
        campaign.attack(subject, settings)
        campaign.baselines(SETTINGS[0].name)
        bar.remove_task(task)
        told = "  ".join(f"{n} {fmean(v):.1f} dB" if v else f"{n} –" for n, v in found.items())
        self.console.print(f"{title}: {told or 'every row was there'}", highlight=False)

    def victims(self, images: str, size: int, seed: int, limit: int | None = None) -> Victims:
        """The clients that hold `images`."""
        path = self.options.data_path if images == self.options.images else None
        gallery = load_gallery(images, size=size, limit=limit or self.options.num_images, path=path)
        for reason in gallery.skipped:
            self.say(f"left out: {reason}")
        return Victims(gallery, self.defense, seed=seed, device=self.device, warn=self.say)

    def accuracies(self, subjects: list[Subject]) -> dict[tuple[str, str, str, str], float]:
        """Top-1 accuracy in per cent by (model, weights, block, setting), of trained models only.

        Those of earlier calls stand in accuracy.csv.
        """
        o, file = self.options, self.options.out / "accuracy.csv"
        known = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=ACCURACY)
        found = {tuple(line[:4]): line[4] for line in known[ACCURACY].itertuples(index=False)}
        trained = [s for s in subjects if "NOT TRAINED" not in s.built.provenance]
        for subject in trained if o.accuracy_data else []:
            built, limit = subject.built, o.accuracy_images
            gallery = load_gallery(o.accuracy_data, size=built.image_size, limit=limit, path=o.accuracy_path)
            victims = Victims(gallery, self.defense, seed=o.seeds[0], device=self.device, warn=self.say)
            for setting in settings_of(subject):
                key = (built.name, built.provenance, built.block, setting.name)
                found[key] = 100 * victims.accuracy(subject, setting, o.batch_size)
        if found:
            pd.DataFrame([(*key, value) for key, value in found.items()], columns=ACCURACY).to_csv(file, index=False)
        return found

    def picture(self, subjects: list[Subject], table: pd.DataFrame) -> None:
        """Reconstructions of the embedded photographs on one block, in the manner of the paper's Figure 5.

        The paper's attack on the paper's block, the strongest on the other.
        """
        block = subjects[0].built.block
        own = table[(table["block"] == block) & (table["setting"] == "a") & table["attack"].isin(self.options.attacks)]
        if own["psnr_mean"].isna().all():
            return  # no attack gave an image, and the table says why
        strongest = own.groupby("attack")["psnr_mean"].mean().idxmax()
        name = "april" if block == "april" and "april" in self.options.attacks else strongest
        attack, panels = {name: ATTACKS.get(name)()}, []
        for subject in subjects:
            if lacks_positions(subject.built):
                continue  # nothing to show: the table says why
            victims = self.victims("photos", subject.built.image_size, self.options.seeds[0], limit=PICTURED)
            clients, originals = victims.decode(range(PICTURED), subject.dtype)
            seen = victims.seen(subject.built, SETTINGS[1], clients, originals).images
            if not panels:
                names = [victims.gallery.images.ids[c].split("/")[0] for c in clients]
                panels += [Panel(n.replace("_", " "), o, s) for n, o, s in zip(names, originals, seen, strict=True)]
            score_images = scorer(subject.built.patch_size, None)
            for setting in SETTINGS[:2]:
                found = answers(victims, subject, [setting], clients, originals, attack, score_images)
                for panel, (_, one) in zip(panels, found[setting, name], strict=True):
                    image = None if one.images is None else one.images[0]
                    cell = Reconstructed(image, one.records[0]["psnr"], one.diagnosis)
                    panel.reconstructions[f"{label(subject)} ({setting.name})"] = cell
        path = self.options.out / f"reconstructions_{block}.png"
        title = f"{name}, {block} block"
        reconstructions_figure(panels, path, seen_title="input\nof (b)", title=title, dpi=PICTURE_DPI)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, "python benchmarks/april_attack.py", __doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    return guarded(lambda: Run(options, terminal())(), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
