"""Do small batches protect?  python benchmarks/batch_rounds.py

No defence, no mask: clients send the gradient of a batch of two or three images, whose position rows add up. A single
step then hides every image behind the others. Clients train for several steps, and their images come back in other
company: k^2 images are dealt out like the points of an affine plane of order k to its k^2 + k lines, so that each
image meets every other one exactly once, in k + 1 steps. The model moves between steps. `batch_rounds` attacks the last
step of the history, for each of k steps that together hold all images; `patch_embedding` on that step alone is the
attack that does not look back.

Writes rows.jsonl.gz, table.csv, separated.png (the embedded photographs) and run.json to --out; --resume goes on with
an unfinished run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from attacks import ATTACKS, Observation, UsageError
from experiments.adaptive.table import adaptive_table
from fedmjp.audit.harness import Scored, score_found, scorer
from fedmjp.audit.per_image import observe_together
from fedmjp.audit.victims import Setting, Subject, Victims, drifted
from fedmjp.cli import guarded, parse, split_commas, terminal
from fedmjp.client import usable_device
from fedmjp.data import load_gallery
from fedmjp.defenses import DEFENSES
from fedmjp.metrics import load_lpips
from fedmjp.models import build_model
from fedmjp.models.weights import IMAGENET_CLASSES, classes_of
from fedmjp.records import provenance
from fedmjp.records.rows import pack_rows, unpack_rows
from fedmjp.records.run_record import note_run
from fedmjp.report import Panel, Reconstructed, RowLog, load_rows, reconstructions_figure

PLAIN = Setting("plain", defended=False, hidden=False, against="original")
ATTACKED_BY = ("patch_embedding", "batch_rounds")


@dataclass(frozen=True)
class Options:
    """Leakage of small batches whose images come back in other company."""

    model: str = "vit_b"
    """A ViT whose channels and patch values both exceed (batch size - 1) times its number of patches."""
    weights: str = "random"
    """random, timm, auto, or a checkpoint's path."""
    images: str = "photos"
    """photos (embedded), a folder of pictures, or a data set's name."""
    num_images: int = 36
    """Most images; a remainder that does not fill a plane (4 images for pairs, 9 for triples) is left out."""
    batch_sizes: tuple[int, ...] = (2, 3)
    """Images a step: 2, 3, 5, 7 (the orders for which the plane is built)."""
    drift: float = 0.01
    """How far the weights move between steps, relative to their size."""
    seed: int = 0
    """Fixes weights and drift."""
    lpips_weights: Path | None = None
    """State dict of lpips.LPIPS(net="squeeze"); without it the column stays empty."""
    device: str = "cpu"
    """cpu or cuda."""
    out: Path = Path("runs/batch_rounds")
    """Folder of rows, tables and figures (the committed ones stand in results/batch_rounds)."""
    resume: bool = False
    """Go on in a folder that holds rows already."""

    def validate(self) -> None:
        """Raise `UsageError` for options that cannot be met, before anything is computed."""
        for size in self.batch_sizes:
            if size < 2 or any(size % d == 0 for d in range(2, size)):
                raise UsageError(f"--batch-sizes {size}: the steps are built for primes (2, 3, 5, 7)")
        if self.batch_sizes and self.num_images < min(self.batch_sizes) ** 2:
            raise UsageError(
                f"--num-images must be at least {min(self.batch_sizes) ** 2}, a plane of the smallest batch"
            )
        if self.out.exists() and any(self.out.glob("rows.jsonl*")) and not self.resume:
            raise UsageError(f"{self.out} holds rows already; pass --resume to go on with them, or another --out")


def affine_plane(order: int) -> list[list[int]]:
    """Lines of the affine plane over the integers modulo a prime: order^2 + order lists of `order` points.

    Any two points share exactly one line; the last `order` lines are parallel and hold every point once.
    """
    points = range(order)
    sloped = [[order * x + (m * x + b) % order for x in points] for m in points for b in points]
    return sloped + [[order * x + y for y in points] for x in points]


class Run:
    """One call of the benchmark."""

    def __init__(self, options: Options, console: Console) -> None:
        options.validate()
        self.options, self.console, self.device = options, console, usable_device(options.device)
        lpips = load_lpips("squeeze", options.lpips_weights, self.device) if options.lpips_weights else None
        classes = classes_of(options.model, options.weights) or IMAGENET_CLASSES
        built = build_model(options.model, num_classes=classes, weights=options.weights, seed=options.seed)
        built.module.to(self.device).eval()
        self.subject = Subject(built)
        self.attacks = {name: ATTACKS.get(name)() for name in ATTACKED_BY}
        self.score = scorer(built.patch_size, lpips)
        self.victims = self.holding(options.images, options.num_images)
        asked = {k: str(v) for k, v in vars(options).items() if k not in ("out", "resume", "device")}
        self.columns = {"run_id": provenance.run_id(asked), **provenance.columns(self.device)}

    def holding(self, images: str, limit: int) -> Victims:
        """The clients of these images."""
        gallery = load_gallery(images, size=self.subject.built.image_size, limit=limit)
        none = DEFENSES.get("none")()
        return Victims(gallery, none, seed=self.options.seed, device=self.device, warn=self.console.print)

    def __call__(self) -> None:
        """Attack, then write table and figure."""
        out = self.options.out
        unpack_rows(out / "rows.jsonl")
        with RowLog(out / "rows.jsonl") as rows:
            for size in self.options.batch_sizes:
                self.attack(size, rows)
        frame = load_rows(out / "rows.jsonl")
        table = adaptive_table(frame, ["model", "weights", "batch_size", "attack"])
        table.to_csv(out / "table.csv", index=False, float_format="%.4g")
        self.console.print(table.to_string(index=False), highlight=False)
        self.picture(min(self.options.batch_sizes))
        note_run(out, "python benchmarks/batch_rounds.py", frame, images=self.victims.gallery.provenance)
        pack_rows(out / "rows.jsonl")
        self.console.print(f"table and figure: {out}", soft_wrap=True, highlight=False)

    def attack(self, size: int, rows: RowLog) -> None:
        """Write every row of one batch size that is missing."""
        planes = [range(s, s + size**2) for s in range(0, len(self.victims) - size**2 + 1, size**2)]
        cases = {name: self.case(size, name) for name in self.attacks}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            task = bar.add_task(f"batches of {size}", total=len(planes) * (size**2 + 2 * size))
            for plane in planes:
                ids = [self.victims.gallery.images.ids[c] for c in plane]
                if all(rows.done(case, [i]) for case in cases.values() for i in ids):
                    bar.advance(task, size**2 + 2 * size)
                    continue
                for name, client, place, one, last in self.follow(self.victims, plane, size, lambda: bar.advance(task)):
                    image_id = self.victims.gallery.images.ids[client]
                    if not rows.done(cases[name], [image_id]):
                        row = one.row(cases[name], image_id, last.gradient_norm(), place)
                        rows.append({**self.columns, **row})

    def follow(
        self, victims: Victims, plane: Sequence[int], size: int, advance: Callable[[], None]
    ) -> Iterator[tuple[str, int, int, Scored, Observation]]:
        """Let the images of one plane go through all its steps, then attack the last `size` of them.

        Yields:
            (attack, client, place in the batch, the batch's scored answer, the attacked step).
        """
        clients, originals = victims.decode(plane)
        if len(clients) < len(plane):
            return  # a picture that cannot be decoded was told of; its plane has no full lines
        lines, steps = affine_plane(size), []
        for number, line in enumerate(lines, start=1):
            built = self.subject.built
            built = drifted(built, self.options.drift, self.options.seed, number) if number > 1 else built
            members = [clients[i] for i in line]
            seen = victims.seen(built, PLAIN, members, originals[line])
            steps.append(observe_together(victims.observe(built, seen, members, self.attacks.values())))
            advance()
        for index in range(len(lines) - size, len(lines)):
            history, line = [*steps[:index], *steps[index + 1 :], steps[index]], lines[index]
            for name, attack in self.attacks.items():
                one = score_found(attack, name, [attack(history)], [originals[line]], self.score)[0]
                for place, member in enumerate(line):
                    yield name, clients[member], place, one, steps[index]
            advance()

    def case(self, size: int, attack: str) -> dict[str, Any]:
        """What tells rows apart (`report.rows.CASE`)."""
        parameters = self.attacks[attack].parameters()
        case = self.victims.case(self.subject, "none", PLAIN.name, attack, parameters, round=size + 1)
        return case | {"batch_size": size}

    def picture(self, size: int) -> None:
        """The embedded photographs, one plane of them: what one step gives of each image, and what all steps give."""
        victims = self.holding("photos", size**2)
        panels: dict[int, Panel] = {}
        for name, client, place, one, _ in self.follow(victims, range(size**2), size, lambda: None):
            image = victims.gallery.images.images([client])[0]
            title = victims.gallery.images.ids[client].split("/")[0].replace("_", " ")
            panel = panels.setdefault(client, Panel(title, image, self._step_of(victims, client, size)))
            found: Tensor | None = None if one.images is None else one.images[place]
            panel.reconstructions[name] = Reconstructed(found, one.records[place]["psnr"], one.diagnosis)
        title = f"{self.subject.built.name}, batches of {size}"
        path = self.options.out / "separated.png"
        reconstructions_figure(list(panels.values()), path, seen_title="batch mean", title=title)

    def _step_of(self, victims: Victims, client: int, size: int) -> Tensor:
        """Mean image of the batch in which a client's image was attacked."""
        line = next(line for line in affine_plane(size)[-size:] if client in line)
        return victims.gallery.images.images(line).mean(dim=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 2 for a mistake of usage, 130 for an interrupt."""
    options = split_commas(parse(Options, "python benchmarks/batch_rounds.py", __doc__, arguments))
    hint = f"finished rows are in {options.out}; go on with --resume --out {options.out}"
    return guarded(lambda: Run(options, terminal())(), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
