"""How far does gradient matching get on Vision Transformers?  python benchmarks/gradient_matching.py

Clients send the whole gradient of one batch; attacks search for images that give the same gradient. Rows by model,
number of images in the batch, defence (none, and mjp at several gamma) and step budget, closed forms beside them. The
clients' loss is the cross-entropy alone. Every answer is held against the original images (setting `original`) and,
under MJP, against what the model saw (setting `seen`). A table says by how much each attack beats the mean image of the
data, which needs no gradient, on the same images.

    python benchmarks/gradient_matching.py --batches 1 2 4 8 --gammas 0.1 0.5 0.9 --steps 60
    python benchmarks/gradient_matching.py --batches 1 --gammas --steps 15 240 --attacks gradvit --resume
    python benchmarks/gradient_matching.py --batches 1 --attacks gradvit --init mjp_subspace --resume

The number of steps decides: papers search for thousands, the default here is what a CPU does in minutes.

Writes rows.jsonl.gz, table.csv, matching.png, reconstructions.png and run.json to --out; --resume goes on with an
unfinished run, or adds batches, budgets and attacks to a finished one. One model a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from attacks import ATTACKS, Attack, ThreatModel, UsageError
from experiments.matching.table import matching_table, write_matching
from fedmjp.audit.campaign import Campaign, answers
from fedmjp.audit.harness import scorer
from fedmjp.audit.victims import NO_MODEL, Setting, Subject, Victims
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import Gallery, load_gallery
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.metrics import load_lpips
from fedmjp.models import MODELS, build_model, split_name
from fedmjp.models.weights import classes_of
from fedmjp.records import provenance
from fedmjp.records.rows import pack_rows, unpack_rows
from fedmjp.report import Panel, Reconstructed, RowLog, load_rows, reconstructions_figure
from fedmjp.report.flags import footnotes, with_table_flags

SHOWN = ["defense", "gamma", "batch", "setting", "attack", "init", "steps", "psnr", "gain", "label_accuracy", "verdict"]
MEAN_OF = 128  # images behind the mean image, at most
PLAIN = Setting("original", defended=False, hidden=False, against="original")
HIDDEN = (
    Setting("original", defended=True, hidden=True, against="original"),
    Setting("seen", defended=True, hidden=True, against="seen"),
)


@dataclass(frozen=True)
class Options:
    """Gradient matching against clients with one image or several, with and without a defence."""

    model: str = "vit_mini_32"
    """Model, without the _mjp suffix."""
    weights: str = "auto"
    """random, timm, auto (shipped weights, else random), or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    data_path: Path | None = None
    """Local copy of the data set named in --images."""
    num_images: int = 8
    """Most images; those that fill no batch are left over."""
    batches: tuple[int, ...] = (1, 4)
    """Images in a client's batch."""
    gammas: tuple[float, ...] = (0.5,)
    """Masking ratios of MJP, beside no defence."""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Attacks, from: {', '.join(ATTACKS)}.")] = (
        "patch_embedding",
        "mjp_subspace",
        "idlg",
        "inverting_gradients",
        "see_through_gradients",
        "april_optimisation",
        "gradvit",
    )
    steps: tuple[int, ...] = (20,)
    """Step budgets of the attacks that search."""
    init: str = "randn"
    """Start of the attacks that search: randn, zeros, or the name of a closed form whose answer is refined."""
    restarts: int = 1
    """Starts a victim."""
    seed: int = 0
    """Fixes random weights, masks, jigsaws and starts."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS(net="squeeze"); without it the column stays empty."""
    lanes: int = 8
    """Images searched for together."""
    pictures: int = 3
    """Embedded photographs in the figure of reconstructions (0: no figure)."""
    device: str = "cpu"
    """cpu, cuda, or cuda:INDEX."""
    out: Path = Path("runs/gradient_matching")
    """Folder of rows, table and figures (the committed ones stand in results/gradient_matching)."""
    resume: bool = False
    """Go on in a folder that holds rows already; rows that are there are not computed again."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        split_name(self.model)
        for option in ("num_images", "lanes", "restarts"):
            if getattr(self, option) < 1:
                raise UsageError(f"--{option.replace('_', '-')} must be at least 1, not {getattr(self, option)}")
        for option in ("batches", "steps"):
            if not getattr(self, option) or min(getattr(self, option)) < 1:
                raise UsageError(f"--{option} takes numbers of at least 1")
        if max(self.batches) > self.num_images:
            raise UsageError(f"--batches {max(self.batches)} needs at least as many --num-images")
        if not 0 <= self.pictures <= 12:
            raise UsageError(f"--pictures must lie between 0 and 12, not {self.pictures}")
        if not self.attacks:
            raise UsageError("--attacks needs at least one name")
        for name, attack in self.made(self.steps[0]).items():
            attack.require(ThreatModel(), name)
        for gamma in self.gammas:
            DEFENSES.get("mjp")(gamma=gamma).validate()
        if self.out.exists() and any(self.out.glob("rows.jsonl*")) and not self.resume:
            raise UsageError(f"{self.out} holds rows already; pass --resume to go on with them, or another --out")

    def made(self, steps: int, on_step=None) -> dict[str, Attack]:
        """The attacks with a step budget; those without steps as they are."""
        asked = {"steps": steps, "init": self.init, "restarts": self.restarts, "seed": self.seed, "on_step": on_step}
        found = {}
        for name in self.attacks:
            known = {f.name for f in fields(ATTACKS.get(name))}
            found[name] = ATTACKS.get(name)(**{k: v for k, v in asked.items() if k in known})
        return found


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
        gamma = f" {self.options.gamma}" if self.defense == "mjp" else ""
        return f"{self.model}, {self.defense}{gamma}, batch {self.batch}"


def cells(options: Options) -> Iterator[Cell]:
    """Every kind of client that is asked for."""
    for batch in options.batches:
        yield Cell(options.model, "none", DEFENSES.get("none")(), (PLAIN,), batch)
        for gamma in options.gammas:
            yield Cell(options.model, "mjp", DEFENSES.get("mjp")(gamma=gamma, dal="none"), HIDDEN, batch)


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        options.validate()
        self.options, self.console, self.device = options, console, usable_device(options.device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.lpips = load_lpips("squeeze", options.lpips_weights, self.device) if options.lpips_weights else None
        asked = {k: str(v) for k, v in vars(options).items() if k not in ("out", "resume", "device", "lanes")}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}

    def __call__(self) -> None:
        """Attack, then write table and figures."""
        o, out = self.options, self.options.out
        unpack_rows(out / "rows.jsonl")
        with RowLog(out / "rows.jsonl") as rows:
            others = {r["model"] for r in rows.rows()} - {o.model, f"{o.model}_mjp", NO_MODEL}
            if others:
                raise UsageError(f"{out} holds rows of {others.pop()}; pass another --out for {o.model}")
            self.attack(rows)
        frame = with_table_flags(load_rows(out / "rows.jsonl"))
        table = matching_table(frame)
        write_matching(table, out)
        if self.options.pictures:
            self.picture()
        self.console.print(
            table[SHOWN].round(2).to_string(index=False),
            highlight=False,
        )
        for line in footnotes(frame):
            self.console.print(line, highlight=False)
        self.describe(frame)
        pack_rows(out / "rows.jsonl")
        self.console.print(f"table and figures: {out}", soft_wrap=True, highlight=False)

    def attack(self, rows: RowLog) -> None:
        """Write every row that is missing."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        mean = self.mean_image()
        with Progress(*columns, console=self.console, transient=True) as bar:
            for cell in cells(self.options):
                subject, victims = self.subject(cell), self.victims(cell)
                task, search = bar.add_task(cell.title, total=None), bar.add_task("loss", total=None)

                def on_step(done: int, steps: int, loss: Tensor, search=search) -> None:
                    bar.update(search, completed=done, total=steps, description=f"mean loss {float(loss.mean()):.3g}")

                budgets = list(self.options.steps)
                bar.update(task, total=len(budgets) * len(victims))
                for steps in budgets:
                    campaign = Campaign(
                        victims,
                        defense=cell.defense,
                        attacks=self.options.made(steps, on_step),
                        rows=rows,
                        columns=self.columns,
                        score_images=scorer(subject.built.patch_size, self.lpips),
                        batch_size=max(1, self.options.lanes // cell.batch),
                        on_batch=lambda count, psnr, task=task: bar.advance(task, count),
                    )
                    campaign.attack(subject, cell.settings)
                    if cell.defense == "none":
                        campaign.baselines(PLAIN.name, mean)
                bar.remove_task(task)
                bar.remove_task(search)
                self.console.print(f"{cell.title}: done", highlight=False)

    def subject(self, cell: Cell) -> Subject:
        """The model that the cell's clients are sent."""
        classes = classes_of(cell.model, self.options.weights) or len(self.gallery(cell.model).images.classes)
        name = cell.options.model_name(cell.model)
        built = build_model(name, num_classes=classes, weights=self.options.weights, dal="none", seed=self.options.seed)
        return Subject(built)

    def gallery(self, model: str) -> Gallery:
        """The images, at the model's size."""
        size = MODELS.get(split_name(model)[0]).image_size
        o = self.options
        return load_gallery(o.images, size=size, limit=o.num_images, path=o.data_path)

    def mean_image(self) -> Tensor:
        """Mean of the set's images, (1, C, H, W): of more than are attacked, or it would show them."""
        o = self.options
        size = MODELS.get(split_name(o.model)[0]).image_size
        gallery = load_gallery(o.images, size=size, limit=MEAN_OF, path=o.data_path)
        every = Victims(gallery, DEFENSES.get("none")(), seed=o.seed, device=self.device, warn=self.console.print)
        return every.mean_image(batch_size=32)

    def victims(self, cell: Cell) -> Victims:
        """The cell's clients."""
        return Victims(
            self.gallery(cell.model),
            cell.options,
            seed=self.options.seed,
            device=self.device,
            warn=self.console.print,
            group=cell.batch,
        )

    def picture(self) -> None:
        """A few embedded photographs, alone in their batch, without a defence, under the largest budget."""
        o = self.options
        cell = Cell(o.model, "none", DEFENSES.get("none")(), (PLAIN,), 1)
        subject = self.subject(cell)
        gallery = load_gallery("photos", size=subject.built.image_size, limit=o.pictures)
        victims = Victims(gallery, cell.options, seed=o.seed, device=self.device, warn=self.console.print)
        clients, originals = victims.decode(range(len(victims)))
        score_images = scorer(subject.built.patch_size, None)
        attacks = o.made(max(o.steps))
        found = answers(victims, subject, [PLAIN], clients, originals, attacks, score_images)
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

    def describe(self, frame) -> None:
        """run.json: commands, versions, commits, machines, weights, warnings."""
        file = self.options.out / "run.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        command = " ".join(["python benchmarks/gradient_matching.py", *sys.argv[1:]])
        record = {
            "commands": [*before.get("commands", []), command],
            "versions": provenance.versions(),
            "commits": sorted(frame["commit"].unique()),
            "devices": sorted(frame["device"].unique()),
            "weights": sorted(set(zip(frame["model"], frame["weights"], strict=True))),
            "warnings": footnotes(frame),
            "rows": len(frame),
        }
        file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, "python benchmarks/gradient_matching.py", __doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    return guarded(lambda: Run(options, terminal())(), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
