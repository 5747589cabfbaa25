"""Train the predictor of places of `attacks.mjp.piece_predictor` on photographs.

A batch has one grid of pieces. Every image gets Gaussian noise of a level of its own, none for a quarter of them, and
of half of the images some pieces lie in their places, as MJP leaves them. The loss is the sum of three cross-entropies:
of the place of each piece that is not in its place, among the free places; of each piece's right neighbour among all
others and of its left one (their mean); and of the lower and the upper one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attacks.mjp.piece_predictor import CHANNELS, SIDE, UNKNOWN, PiecePredictor, PieceScores

NOISE = (0.02, 0.3)  # standard deviations, in units of [0, 1]: 34 to 10 dB
NOISELESS, FRAMED = 0.25, 0.5  # shares of the images without noise, and with pieces in their places
BETAS, WEIGHT_DECAY, WARMUP, CLIP = (0.9, 0.98), 0.05, 0.05, 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        width, depth: of the network.
        grids: sides of the square grids, in pieces, that batches are drawn from.
        pieces: of a batch, all images together.
        steps: of the optimiser.
        learning_rate: highest one; it rises over the first steps and falls along half a cosine.
        seed: of weights and draws.
    """

    width: int = 128
    depth: int = 6
    grids: tuple[int, ...] = (8, 14, 8, 7, 14)
    pieces: int = 4096
    steps: int = 4500
    learning_rate: float = 2e-3
    seed: int = 0


def train_predictor(
    images: Tensor,
    recipe: Recipe,
    report: Callable[[int, float], None] = lambda step, loss: None,
    start: PiecePredictor | None = None,
) -> PiecePredictor:
    """Train a predictor in float32.

    Args:
        images: (n, 3, H, W) uint8.
        report: called with the step, from 1, and the loss.
        start: a predictor to continue from, of its own width and depth, which is changed; None for random weights.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    device = images.device
    model = (start or PiecePredictor(recipe.width, recipe.depth)).to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), recipe.learning_rate, BETAS, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / recipe.steps))
    for step in range(1, recipe.steps + 1):
        side = recipe.grids[int(torch.randint(len(recipe.grids), (), generator=generator))]
        chosen = torch.randint(len(images), (recipe.pieces // side**2,), generator=generator)
        pieces = draw_pieces(images[chosen.to(device)].float() / 255, side, generator)
        places = draw_places(len(chosen), side, generator).to(device)
        scores = model(pieces, (side, side), places)
        loss = prediction_loss(scores, (side, side), places)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        schedule.step()
        report(step, float(loss.detach()))
    return model.eval()


def _rate(progress: float) -> float:
    if progress < WARMUP:
        return (progress + 1e-3) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def draw_pieces(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Pieces (B, side^2, 3, SIDE, SIDE) of images (B, 3, H, W) in [0, 1], half of them mirrored, with noise."""
    batch, pixels = len(images), side * SIDE
    mirrored = torch.rand(batch, generator=generator) < 0.5
    images = torch.where(mirrored.view(-1, 1, 1, 1).to(images.device), images.flip(3), images)
    if images.shape[2:] != (pixels, pixels):
        images = F.interpolate(images, (pixels, pixels), mode="bilinear", antialias=True)
    cut = images.reshape(batch, CHANNELS, side, SIDE, side, SIDE).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    low, high = (math.log(level) for level in NOISE)
    level = torch.exp(low + (high - low) * torch.rand(batch, generator=generator))
    level = torch.where(torch.rand(batch, generator=generator) < NOISELESS, 0.0, level)
    noise = torch.randn(cut.shape, generator=generator)
    return cut + (level.view(-1, 1, 1, 1, 1) * noise).to(cut.device)


def draw_places(batch: int, side: int, generator: torch.Generator) -> Tensor:
    """(B, N) int64: the place of each piece, `UNKNOWN` for a random share of them in framed images, else for all."""
    count = side**2
    hidden = torch.where(torch.rand(batch, generator=generator) < FRAMED, torch.rand(batch, generator=generator), 1.0)
    ranks = torch.rand(batch, count, generator=generator).argsort(dim=1).argsort(dim=1)
    unknown = ranks < (hidden * count).ceil().clamp(min=2)[:, None]
    return torch.where(unknown, UNKNOWN, torch.arange(count))


def prediction_loss(scores: PieceScores, grid: tuple[int, int], places: Tensor) -> Tensor:
    """The loss of pieces that were given in the order of their places, a scalar.

    Args:
        scores: of the predictor.
        grid: (rows, columns).
        places: (B, N) int64, as the predictor was given them.
    """
    rows, columns = grid
    true = torch.arange(rows * columns, device=places.device).expand_as(places)
    unknown = places == UNKNOWN
    free = scores.place.float().masked_fill(~unknown[:, None, :], -torch.inf)
    losses = [F.cross_entropy(free[unknown], true[unknown])]
    board = torch.arange(rows * columns, device=places.device).view(rows, columns)
    for logits, first, second in (
        (scores.right, board[:, :-1], board[:, 1:]),
        (scores.below, board[:-1], board[1:]),
    ):
        first, second = first.flatten(), second.flatten()
        others = logits.float().masked_fill(
            torch.eye(rows * columns, dtype=torch.bool, device=places.device), -torch.inf
        )
        onward, back = others[:, first], others.mT[:, second]
        losses += [
            (F.cross_entropy(way.flatten(0, 1), goal.repeat(len(places))) / 2)
            for way, goal in ((onward, second), (back, first))
        ]
    return losses[0] + losses[1] + losses[2] + losses[3] + losses[4]
