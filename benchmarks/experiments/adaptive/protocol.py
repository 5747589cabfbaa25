"""What does MJP hide from an adversary that knows it?  python benchmarks/mjp_adaptive.py

Two experiments on the same photographs, under masks drawn anew in every update, gradients in float32:

- leakage against gamma, one update: the naive closed forms (APRIL's on APRIL's block, for which it is exact) beside the
  attacks that know the defence;
- leakage against the number of updates of one image, for several gamma, with the masks of the paper (every step) and of
  the released code (every other step is not jigsawed at all). The model moves between updates.

Clients train with the whole loss of the defence, the localisation term included; batches of one image. Every
reconstruction is held against the original image; `psnr_visible` counts the visible patches alone.

Writes rows.jsonl.gz, one_update.csv, updates.csv, leakage.png, round_by_round.png and run.json to --out; --resume goes
on with an unfinished run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from attacks import ATTACKS, Capability, Observation, ThreatModel, UsageError
from attacks.memory import remember
from experiments.adaptive.table import round_by_round_figure, write_adaptive
from fedmjp.audit.harness import Scored, score_found, scorer
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES, Defense
from fedmjp.metrics import load_lpips
from fedmjp.metrics.pixel import LEAST_MSE
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records import provenance
from fedmjp.records.rows import pack_rows, unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.report import RowLog, load_rows

MASKED = Setting("masked", defended=True, hidden=True, against="original")
NAIVE = "april"
PICTURED, PICTURED_BY, PICTURED_GAMMA, PICTURED_UPDATES = 3, ("mjp_rounds",), 0.5, (1, 2, 4, 6, 8, 12, 16)
# Most updates followed at each gamma: the larger the mask, the more it takes.
UPDATES = {0.1: (1, 2, 3, 4, 6), 0.3: (1, 2, 4, 6, 9), 0.5: (1, 4, 8, 16, 24), 0.9: (1, 20, 40, 80)}


@dataclass(frozen=True)
class Options:
    """Leakage of MJP under attacks that know it."""

    model: str = "deit_s"
    """Model without its _mjp suffix."""
    weights: str = "random"
    """random, timm, auto, or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 50
    """Most images."""
    gammas: tuple[float, ...] = (0.03, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Masking ratios of the first experiment."""
    attacks: tuple[str, ...] = ("april", "patch_embedding", "mjp_subspace")
    """Attacks of the first experiment. april runs on APRIL's block, the others on the standard one."""
    update_gammas: tuple[float, ...] = tuple(UPDATES)
    """Masking ratios of the second experiment."""
    update_attacks: tuple[str, ...] = ("mjp_rounds",)
    """Attacks of the second experiment. unmix_rounds takes minutes an image."""
    updates: tuple[int, ...] = ()
    """Numbers of updates after which to attack (none given: 1 to 6 at gamma 0.1, up to 80 at 0.9)."""
    schedules: tuple[Literal["paper", "released"], ...] = ("paper", "released")
    """Jigsaw in every step, or with probability 1/2 as in the released code."""
    drift: float = 0.01
    """How far the weights move between updates, relative to their size."""
    seed: int = 0
    """Fixes weights, masks and drift."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS(net="squeeze"); without it the column stays empty."""
    batch_size: int = 10
    """Images that go through their updates together."""
    device: str = "cpu"
    """cpu or cuda."""
    out: Path = Path("runs/mjp_adaptive")
    """Folder of rows, tables and figures (the committed ones stand in results/mjp_adaptive)."""
    resume: bool = False
    """Go on in a folder that holds rows already."""


@dataclass(frozen=True)
class Case:
    """One curve's victims: a masking ratio, a schedule, and after how many updates who attacks."""

    gamma: float
    schedule: Literal["paper", "released"]
    attacks: Mapping[int, tuple[str, ...]]
    block: Literal["standard", "april"] = "standard"

    def defense(self) -> Defense:
        """The clients' defence."""
        return DEFENSES.get("mjp")(gamma=self.gamma, jigsaw_probability=0.5 if self.schedule == "released" else 1.0)


def cases(options: Options) -> Iterator[Case]:
    """Both experiments, the same gamma's first update shared."""
    for gamma in dict.fromkeys((*options.gammas, *options.update_gammas)):
        asked = options.attacks if gamma in options.gammas else ()
        single = tuple(name for name in asked if name != NAIVE)
        counts = (options.updates or UPDATES.get(gamma, (1, 2, 4, 8))) if gamma in options.update_gammas else ()
        plan = {count: options.update_attacks for count in counts}
        if NAIVE in asked:
            yield Case(gamma, "paper", {1: (NAIVE,)}, block="april")
        if single or "paper" in options.schedules and counts:
            paper = plan if "paper" in options.schedules else {}
            yield Case(gamma, "paper", paper | {1: (*single, *paper.get(1, ()))})
        if "released" in options.schedules and counts:
            yield Case(gamma, "released", plan)


def _validate(options: Options) -> None:
    """Raise `UsageError` for options that cannot be met, before anything is computed."""
    for name in (*options.attacks, *options.update_attacks):
        ATTACKS.get(name)().require(ThreatModel(), name)
    if min(options.num_images, options.batch_size, *options.updates) < 1:
        raise UsageError("--num-images, --batch-size and --updates must be at least 1")
    for gamma in (*options.gammas, *options.update_gammas):
        DEFENSES.get("mjp")(gamma=gamma).validate()
    if options.out.exists() and any(options.out.glob("rows.jsonl*")) and not options.resume:
        raise UsageError(f"{options.out} holds rows already; pass --resume to go on with them, or another --out")


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        _validate(options)
        self.options, self.console, self.device = options, console, usable_device(options.device)
        lpips = load_lpips("squeeze", options.lpips_weights, self.device) if options.lpips_weights else None
        blocks = ("standard", "april") if NAIVE in options.attacks else ("standard",)
        self.subjects = {block: self.subject(block) for block in blocks}
        sent = self.subjects["standard"].built
        self.score = scorer(sent.patch_size, lpips)
        self.gallery = load_gallery(options.images, size=sent.image_size, limit=options.num_images)
        asked = {k: str(v) for k, v in vars(options).items() if k not in ("out", "resume", "device")}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}

    def subject(self, block: str) -> Subject:
        """The model that clients are sent in their first update; its block may be of the server's choosing."""
        o = self.options
        name = f"{o.model}_mjp"
        classes = classes_of(name, o.weights) or IMAGENET_CLASSES
        built = build_model(name, num_classes=classes, weights=o.weights, block=block, dal="nonlinear", seed=o.seed)
        built.module.to(self.device).eval()
        extra = {Capability.MODIFIED_MODEL} if block == "april" else set()
        return Subject(built, ThreatModel(ThreatModel().grants | extra))

    def __call__(self) -> None:
        """Attack, then write tables and figures."""
        out = self.options.out
        unpack_rows(out / "rows.jsonl")
        with RowLog(out / "rows.jsonl") as rows:
            self.attack(rows)
        frame = load_rows(out / "rows.jsonl")
        write_adaptive(frame, out)
        round_by_round_figure(self.pictures(), out / "round_by_round.png")
        for file in (out / "one_update.csv", out / "updates.csv"):
            if file.exists():
                self.console.print(pd.read_csv(file).to_string(index=False), highlight=False)
        note_run(out, "python benchmarks/mjp_adaptive.py", frame, images=self.gallery.provenance)
        pack_rows(out / "rows.jsonl")
        self.console.print(f"tables and figures: {out}", soft_wrap=True, highlight=False)

    def attack(self, rows: RowLog) -> None:
        """Write every row that is missing."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            for case in cases(self.options):
                defense = case.defense()
                victims = Victims(
                    self.gallery, defense, seed=self.options.seed, device=self.device, warn=self.console.print
                )
                batches = [b for b in victims.batches(self.options.batch_size) if self._lacking(rows, case, victims, b)]
                title = f"gamma {case.gamma}, {case.schedule} schedule"
                task = bar.add_task(title, total=len(batches) * max(case.attacks))
                for batch in batches:
                    for number, client, name, one, last, _ in self.follow(
                        case, victims, batch, partial(bar.advance, task)
                    ):
                        self.write(rows, self.case(victims, case, number, name), client, one, last)
                bar.remove_task(task)
                self.console.print(f"{title}: done", highlight=False)

    def _lacking(self, rows: RowLog, case: Case, victims: Victims, batch: Sequence[int]) -> bool:
        asked = [self.case(victims, case, count, name) for count, names in case.attacks.items() for name in names]
        ids = [victims.gallery.images.ids[c] for c in batch]
        return not all(rows.done(line, [name]) for line in asked for name in ids)

    def write(self, rows: RowLog, case: dict[str, Any], client: int, one: Scored, last: Observation) -> None:
        """Append one row, unless it is there."""
        image_id = self.gallery.images.ids[client]
        if not rows.done(case, [image_id]):
            rows.append({**self.columns, **one.row(case, image_id, last.gradient_norm())})

    def follow(
        self, case: Case, victims: Victims, batch: Sequence[int], advance: Callable[[], None]
    ) -> Iterator[tuple[int, int, str, Scored, Observation, Tensor]]:
        """Let clients send one update after the other.

        Yields:
            (updates so far, client, attack, its scored answer, last observation, mask of the last update (N,)).
        """
        clients, originals = victims.decode(batch)
        histories: list[list[Observation]] = [[] for _ in clients]
        built = self.subjects[case.block].built
        for number in range(1, max(case.attacks) + 1):
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            seen = victims.seen(built, MASKED, clients, originals, update=number - 1)
            due = {name: ATTACKS.get(name)() for name in case.attacks.get(number, ())}
            observations = victims.observe(built, seen, clients, due.values(), victims.defense.loss_weights())
            for history, observation in zip(histories, observations, strict=True):
                history.append(observation)
            masks = torch.zeros(len(clients), math.prod(built.grid), dtype=torch.bool)
            masks = masks if seen.position_mask is None else seen.position_mask
            for name, attack in due.items():
                found = attack.attack_many(histories)
                scored = score_found(attack, name, found, list(originals[:, None]), self.score)
                for client, one, history, mask in zip(clients, scored, histories, masks, strict=True):
                    visible = psnr_of_patches(one.images, originals[clients.index(client)], ~mask, built.patch_size)
                    details = {**one.reconstruction.details, "psnr_visible": visible}
                    answer = replace(one.reconstruction, details=details)
                    yield number, client, name, replace(one, reconstruction=answer), history[-1], mask
            for history in histories:
                history[-1] = remember(history[-1])
            advance()

    def case(self, victims: Victims, case: Case, number: int, attack: str) -> dict[str, Any]:
        """What tells rows apart (`report.rows.CASE`)."""
        parameters = ATTACKS.get(attack)().parameters()
        return victims.case(self.subjects[case.block], "mjp", case.schedule, attack, parameters, round=number)

    def pictures(self) -> dict[str, tuple[Tensor, dict[int, Tensor]]]:
        """Two embedded photographs with what `mjp_rounds` makes of them after 1, 2, ... updates at gamma 0.5."""
        gallery = load_gallery("photos", size=self.subjects["standard"].built.image_size, limit=PICTURED)
        case = Case(PICTURED_GAMMA, "paper", {number: PICTURED_BY for number in PICTURED_UPDATES})
        victims = Victims(gallery, case.defense(), seed=self.options.seed, device=self.device, warn=self.console.print)
        found: dict[str, tuple[Tensor, dict[int, Tensor]]] = {}
        for number, client, _, one, _, _ in self.follow(case, victims, range(len(victims)), lambda: None):
            name = gallery.images.ids[client].split("/")[0]
            found.setdefault(name, (gallery.images.images([client])[0], {}))[1][number] = one.images[0]
        return found


def psnr_of_patches(images: Tensor | None, original: Tensor, chosen: Tensor, patch_size: int) -> float:
    """PSNR (dB) over the chosen patches (N,) of one image; NaN where there is no image or nothing is chosen."""
    if images is None or not chosen.any():
        return float("nan")
    error = F.avg_pool2d((images[0] - original).square().mean(dim=0)[None, None], patch_size).flatten()  # (N,)
    return float(-10 * error[chosen.to(error.device)].mean().clamp(min=LEAST_MSE).log10())


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, "python benchmarks/mjp_adaptive.py", __doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    return guarded(lambda: Run(options, terminal())(), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
