"""Train the predictor of places, measure it on images that it has not seen, and write both down."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from attacks.mjp.piece_predictor import UNKNOWN, PiecePredictor
from attacks.mjp.piece_training import Recipe, train_predictor
from experiments.piece_predictor.options import Options, PublicPhotographs
from experiments.session import prepare_torch
from fedmjp.data import ImageSet, load_data, load_gallery
from fedmjp.records import provenance

HELD, SIDE = 1000, 8  # test images and pieces a side of the accuracy
LEVELS = {"exact": 0.0, "25 dB": 10**-1.25, "20 dB": 0.1, "15 dB": 10**-0.75}  # standard deviation of the noise
THUMBNAIL, ALIKE = 16, 0.9  # pixels a side, and the correlation from which on two images show the same
CHUNK, REPORT = 500, 100


@dataclass(frozen=True)
class Public:
    """Photographs to learn from.

    Attributes:
        images: (n, 3, H, W) uint8, without those that show a scored one.
        left_out: number of those.
        held: (m, 3, H, W) uint8, test images, on the processor.
        provenance: of the data set.
    """

    images: Tensor
    left_out: int
    held: Tensor
    provenance: str


@dataclass(frozen=True)
class Training:
    """What the card says of a training."""

    loss: float
    seconds: float


def run(options: Options, console: Console) -> None:
    """Train, measure and write."""
    device = prepare_torch(options)
    start = None if options.start is None else PiecePredictor.load(options.start)
    public = public_photographs(options, device)
    recipe = Recipe(
        width=options.width,
        depth=options.depth,
        steps=options.steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        if step % REPORT == 0:
            console.print(f"step {step}: loss {sum(losses[-REPORT:]) / REPORT:.3f}", highlight=False)

    started = time.process_time()
    predictor = train_predictor(public.images, recipe, report, start)
    last = losses[-REPORT:]
    training = Training(sum(last) / len(last), time.process_time() - started)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    predictor.save(options.out)
    accuracies = measure(PiecePredictor.load(options.out), public.held)
    write_card(options, card_text(options, public, training, predictor, recipe, accuracies), console)


def public_photographs(options: PublicPhotographs, device: torch.device) -> Public:
    """The photographs that `options` name, the training images on `device`."""
    data = load_data(
        options.images,
        size=options.image_size,
        path=options.data_path,
        train_limit=options.num_images,
        test_limit=HELD,
        seed=options.seed,
    )
    images, count = pixels_of(data.train).to(device), len(data.train)
    if options.scored is not None:
        gallery = load_gallery(str(options.scored), size=options.image_size)
        images = images[~shown_in(images, pixels_of(gallery.images).to(device))]
    return Public(images, count - len(images), pixels_of(data.test).cpu(), data.provenance)


def write_card(options: PublicPhotographs, text: str, console: Console) -> None:
    """Write the card beside the file."""
    card = options.out.with_suffix(".md")
    card.write_text(text, encoding="utf-8")
    console.print(f"{options.out} and {card}", soft_wrap=True, highlight=False)


def pixels_of(images: ImageSet) -> Tensor:
    """All images as (n, 3, H, W) uint8."""
    parts = [range(start, min(start + CHUNK, len(images))) for start in range(0, len(images), CHUNK)]
    return torch.cat([(255 * images.images(part)).round().to(torch.uint8) for part in parts])


def shown_in(images: Tensor, others: Tensor) -> Tensor:
    """(n,) bool: whether one of `others` (m, 3, H, W) uint8 shows what each of `images` (n, 3, H, W) shows.

    Compared are thumbnails without their mean, by correlation, so that rescaling and compression do not matter.
    """
    theirs = _thumbnails(others)
    return torch.cat([(_thumbnails(part) @ theirs.T).amax(dim=1) > ALIKE for part in images.split(CHUNK)])


def _thumbnails(images: Tensor) -> Tensor:
    small = F.interpolate(images.float(), (THUMBNAIL, THUMBNAIL), mode="area").flatten(1)
    return F.normalize(small - small.mean(dim=1, keepdim=True), dim=1)


@torch.no_grad()
def measure(predictor: PiecePredictor, images: Tensor) -> dict[str, tuple[float, float, float]]:
    """By level of noise: shares of places and of right neighbours predicted with all pieces scrambled, and of places
    with every other piece in its place.

    Args:
        images: (n, 3, H, W) uint8, of `SIDE` pieces a side.
    """
    count = SIDE**2
    true, pieces = torch.arange(count), cut_pieces(images)
    free = torch.full((count,), UNKNOWN)
    half = torch.where(true % 2 == 0, true, UNKNOWN)
    within = torch.arange(count).view(SIDE, SIDE)[:, :-1].flatten()
    found: dict[str, tuple[float, float, float]] = {}
    generator = torch.Generator().manual_seed(0)
    for level, deviation in LEVELS.items():
        sums = torch.zeros(3)
        for part in pieces.split(64):
            noisy = part + deviation * torch.randn(part.shape, generator=generator)
            scores = predictor(noisy, (SIDE, SIDE), free.expand(len(part), -1))
            framed = predictor(noisy, (SIDE, SIDE), half.expand(len(part), -1)).place[..., 1::2].argmax(dim=2) * 2 + 1
            right = scores.right.masked_fill(torch.eye(count, dtype=torch.bool), -torch.inf)[:, within].argmax(dim=2)
            hits = (scores.place.argmax(dim=2) == true, right == within + 1, (framed == true)[:, 1::2])
            sums += torch.tensor([float(hit.double().mean()) * len(part) for hit in hits])
        found[level] = tuple((sums / len(pieces)).tolist())
    return found


def cut_pieces(images: Tensor) -> Tensor:
    """(n, SIDE^2, 3, p, p) in [0, 1], of images (n, 3, H, W) uint8."""
    size = images.shape[-1] // SIDE
    pieces = images.float().div(255).unfold(2, size, size).unfold(3, size, size)  # (n, 3, SIDE, SIDE, p, p)
    return pieces.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def card_text(
    options: Options,
    public: Public,
    training: Training,
    predictor: PiecePredictor,
    recipe: Recipe,
    accuracies: dict[str, tuple[float, float, float]],
) -> str:
    """The card of a predictor."""
    seen = sum(recipe.pieces // side**2 for side in recipe.grids) / len(recipe.grids) * recipe.steps
    facts = {
        "network": f"{len(predictor.unknown)} channels, {predictor.blocks.num_layers} blocks, stored as float16",
        **earlier(options.start),
        "recipe": f"{recipe.steps} steps of {recipe.pieces} pieces (about {seen:,.0f} images), grids of "
        f"{', '.join(str(side) for side in recipe.grids)} pieces a side, AdamW, rate {recipe.learning_rate:g}",
        "loss at the end": f"{training.loss:.2f} (mean of the last {REPORT} steps)",
    }
    what = "A predictor of the places of a photograph's pieces (`attacks.mjp.piece_predictor`)"
    return card(
        options,
        what,
        public,
        facts,
        training.seconds,
        [
            f"Accuracy on {HELD} test images, {SIDE} x {SIDE} pieces, Gaussian noise, best guess for each piece alone "
            f"(chance {1 / SIDE**2:.1%}; with every other piece in place {2 / SIDE**2:.1%}):",
            "",
            "| pieces | place | right neighbour | place, every other piece in its place |",
            "|---|---|---|---|",
            *(f"| {level} | {a:.1%} | {b:.1%} | {c:.1%} |" for level, (a, b, c) in accuracies.items()),
        ],
    )


def earlier(start: Path | None) -> dict[str, str]:
    """What the card beside the predictor that a training continues from says of its own training."""
    if start is None:
        return {}
    beside = start.with_suffix(".md")
    if not beside.exists():
        return {"continued from": f"{start.name}, which has no card"}
    lines = (line.strip("| ").split(" | ") for line in beside.read_text(encoding="utf-8").splitlines())
    rows = {line[0]: line[1] for line in lines if len(line) == 2}
    parts = [rows[name] for name in ("continued from", "recipe", "time", "commit") if name in rows]
    return {"continued from": f"a predictor of {', '.join(parts)}"}


def card(
    options: PublicPhotographs, what: str, public: Public, facts: dict[str, str], seconds: float, measured: list[str]
) -> str:
    """The card of a file: what it is, what it was learned from and how, and what was measured."""
    data = {
        "data": public.provenance,
        "training images": f"{len(public.images)}; left out because a scored photograph shows the same: "
        f"{public.left_out}",
    }
    end = {
        "time": f"{seconds / 60:.1f} CPU minutes on {provenance.columns(torch.device('cpu'))['device']}",
        "commit": provenance.commit(),
        "torch": torch.__version__,
    }
    lines = [
        f"# {options.out.stem}",
        "",
        f"{what}, for adversaries with public photographs (`auxiliary_data`).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in (data | facts | end).items()),
        "",
        *measured,
        "",
        f"    python benchmarks/{Path(sys.argv[0]).name} {_arguments(options)}",
        "",
        "Weights are released under this project's licence; the images they were learned from are no part of it and",
        "have terms of their own.",
        "",
    ]
    return "\n".join(lines)


def _arguments(options: PublicPhotographs) -> str:
    """The command's arguments, with folders named DIR."""
    given, folders = sys.argv[1:], {str(options.data_path), str(options.scored)}
    return shlex.join("DIR" if entry in folders else entry for entry in given)
