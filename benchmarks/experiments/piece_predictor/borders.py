"""Fit the mixture of borders, measure it on images that it has not seen, and write both down."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from torch import Tensor

from attacks.mjp.border_mixture import BorderMixture, fit_borders
from experiments.piece_predictor.options import BorderOptions
from experiments.piece_predictor.protocol import (
    LEVELS,
    SIDE,
    card,
    cut_pieces,
    public_photographs,
    write_card,
)
from experiments.session import prepare_torch

IMAGES = 100  # test images of the accuracy


def run(options: BorderOptions, console: Console) -> None:
    """Fit, measure and write."""
    public = public_photographs(options, prepare_torch(options))
    started = time.process_time()
    mixture = fit_borders(
        public.images,
        options.components,
        count=options.windows,
        iterations=options.iterations,
        seed=options.seed,
    )
    seconds = time.process_time() - started
    options.out.parent.mkdir(parents=True, exist_ok=True)
    mixture.save(options.out)
    accuracies = right_neighbours(BorderMixture.load(options.out), public.held[:IMAGES])
    facts = {
        "mixture": f"{options.components} Gaussians of mean zero, stored as float16",
        "fit": f"{options.windows} windows, {options.iterations} steps of expectation and maximisation",
    }
    measured = [
        f"Accuracy on {IMAGES} test images, {SIDE} x {SIDE} pieces, Gaussian noise, best guess for each piece alone "
        f"(chance {1 / (SIDE**2 - 1):.1%}):",
        "",
        "| pieces | right neighbour |",
        "|---|---|",
        *(f"| {level} | {share:.1%} |" for level, share in accuracies.items()),
    ]
    what = "A mixture of Gaussians on the pixels at both sides of a border (`attacks.mjp.border_mixture`)"
    write_card(options, card(options, what, public, facts, seconds, measured), console)


def right_neighbours(mixture: BorderMixture, images: Tensor) -> dict[str, float]:
    """By level of noise, the share of right neighbours in images (n, 3, H, W) uint8 that are the likeliest."""
    generator, count = torch.Generator().manual_seed(0), SIDE**2
    itself = torch.eye(count, dtype=torch.bool)
    within = torch.arange(count).view(SIDE, SIDE)[:, :-1].flatten()
    found = {}
    for level, deviation in LEVELS.items():
        hits = []
        for pieces in cut_pieces(images):
            noisy = pieces + deviation * torch.randn(pieces.shape, generator=generator)
            ratio = mixture.right(noisy, mixture.variance(noisy)).masked_fill(itself, -torch.inf)
            hits.append((ratio[within].argmax(dim=1) == within + 1).double().mean())
        found[level] = float(torch.stack(hits).mean())
    return found
