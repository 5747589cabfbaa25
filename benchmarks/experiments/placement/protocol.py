"""Pieces put back in their places; the protocol stands in `options.Options`."""

from __future__ import annotations

import math
import time
import zlib
from itertools import product

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from attacks.mjp.border_mixture import SHIPPED as SHIPPED_MIXTURE
from attacks.mjp.piece_predictor import SHIPPED
from attacks.mjp.placement import Placement
from experiments.placement.options import Options
from experiments.placement.render import EXACT, PLACEMENT, SCHEMA
from experiments.session import Session
from fedmjp.defenses.masking import block_masks, jigsaw_order
from fedmjp.records.rows import RowLog

CLOSEST = 10 ** (-EXACT / 10)  # smallest squared error that PSNR resolves


def run(options: Options, console: Console) -> None:
    """Place, then write the table."""
    session = Session(options, console, SCHEMA)
    gallery = session.gallery(options.images, size=options.image_size, limit=options.num_images, path=options.data_path)
    with session.rows(seed=options.seed) as rows, session.bar() as bar:
        task = bar.add_task("photographs", total=len(gallery.images))
        for index, name in enumerate(gallery.images.ids):
            place_one(options, session, rows, gallery.name, name, gallery.images.images([index])[0])
            bar.advance(task)
    session.finish("placement", PLACEMENT, images=gallery.provenance)
    console.print(pd.read_csv(options.out / "table.csv").to_string(index=False), highlight=False)


def place_one(options: Options, session: Session, rows: RowLog, dataset: str, name: str, image: Tensor) -> None:
    """Scramble one photograph (3, H, W) in every way that is asked for, and let every solver place it."""
    side = options.image_size // options.patch_size
    pieces = cut(image.double(), options.patch_size)
    for gamma, level in product(options.gammas, options.levels):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{options.seed} {name} {side} {gamma}".encode()))
        masked = block_masks(1, (side, side), gamma, generator)
        order = jigsaw_order(masked, generator)[0]
        degraded = degrade(pieces, level, generator)
        for solver in options.solvers:
            case = {"dataset": dataset, "solver": solver, **learned_of(solver, options)}
            case |= {"image_size": options.image_size, "pieces": side**2, "gamma": gamma}
            case |= {
                "level": float(min(level, EXACT)),
                "seed": options.seed,
                "restarts": options.restarts,
                "image_id": name,
            }
            if rows.has(case):
                continue
            placement = Placement(
                solver=solver,
                predictor=options.predictor,
                mixture=options.mixture,
                restarts=options.restarts,
            )
            started = time.process_time()
            found = order[placement.place((side, side), degraded[order], masked[0])]  # (N,) piece at each place
            seconds = time.process_time() - started
            error = (degraded[found] - pieces).square().mean().clamp(min=CLOSEST)
            hidden = masked[0]
            scores = {
                "hidden": int(hidden.sum()),
                "in_place": float((found == torch.arange(side**2))[hidden].double().mean()),
                "neighbours": joined(found.view(side, side), hidden.view(side, side)),
                "psnr": float(-10 * error.log10()),
            }
            rows.append({**session.columns, **case, **scores, "seconds": seconds})


def joined(found: Tensor, hidden: Tensor) -> float:
    """Share of the pairs of places side by side, of which one at least is hidden, that hold neighbours.

    Args:
        found: (rows, columns) int64, the piece at each place, numbered row by row.
        hidden: (rows, columns) bool.
    """
    columns = found.shape[1]
    within = found[:, :-1] % columns != columns - 1  # the last piece of a row has none to its right
    right = (found[:, 1:] == found[:, :-1] + 1) & within
    below = found[1:] == found[:-1] + columns
    counted = hidden[:, 1:] | hidden[:, :-1], hidden[1:] | hidden[:-1]
    return float(torch.cat([right[counted[0]], below[counted[1]]]).double().mean())


def learned_of(solver: str, options: Options) -> dict[str, str]:
    """What a row says of predictor and mixture; nothing where there are none."""
    if solver == "border":
        return {"model": "", "weights": ""}
    files = (options.predictor or f"shipped {SHIPPED.name}", options.mixture or f"shipped {SHIPPED_MIXTURE.name}")
    return {"model": "piece_predictor, border_mixture", "weights": ", ".join(files)}


def cut(image: Tensor, size: int) -> Tensor:
    """The pieces (N, C, size, size) of an image (C, H, W), row by row."""
    channels = len(image)
    pieces = image.unfold(1, size, size).unfold(2, size, size)  # (C, rows, columns, size, size)
    return pieces.permute(1, 2, 0, 3, 4).reshape(-1, channels, size, size)


def degrade(pieces: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """Pieces with Gaussian noise of exactly `level` dB over all of them; as they are at infinity."""
    noise = torch.randn(pieces.shape, generator=generator, dtype=pieces.dtype)
    if math.isinf(level):
        return pieces
    return pieces + noise * (10 ** (-level / 10) / noise.square().mean()).sqrt()
