"""Whether a reconstruction gives its original away: the original's rank among images of the same data set.

Candidates are the original and test images of the federation's data (`fedmjp.metrics.reidentification`).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd
import torch

from experiments.federations import read_measured, write_measured
from fedmjp.client import shared_data
from fedmjp.config import DataConfig, RunConfig
from fedmjp.metrics import load_lpips
from fedmjp.metrics.reidentification import Lineup
from fedmjp.records.images import read_pair
from fedmjp.records.rows import BASELINES, load_rows
from fedmjp.records.run_folder import RunFolder

FILE = "ranks.csv"
CANDIDATES = 1000  # the original among them; fewer where the data set has fewer test images
KEYS = ["round", "client", "image", "attack"]


def measure_ranks(config: RunConfig, folder: RunFolder) -> None:
    """Write the rank of the original of each reconstruction of a federation.

    Nothing where LPIPS has no weights here, or where the images are too small for its backbone.

    Ranks are of the 8-bit pictures that the run wrote.
    """
    lineup = _lineup(config.data, config.model.side(), config.seed, config.audit.lpips_net, config.audit.lpips_weights)
    if lineup is None:
        return
    rows = load_rows(config.out / "rows.jsonl")
    frames = []
    for _, own in rows[~rows["attack"].isin(BASELINES)].groupby("attack", sort=False):
        pairs = [read_pair(config.out, row) for row in own.to_dict("records")]
        own, shown = own[[pair is not None for pair in pairs]], [pair for pair in pairs if pair is not None]
        if shown:
            originals, found = (torch.stack(parts) for parts in zip(*shown, strict=True))
            frames.append(own[KEYS].assign(rank=lineup.ranks(originals, found, list(own["image_id"]))))
    table = pd.concat(frames) if frames else pd.DataFrame(columns=[*KEYS, "rank"])
    table = table.assign(candidates=len(lineup.others) + 1)
    write_measured(table, config.out / FILE)


def read_ranks(out: Path) -> pd.DataFrame | None:
    """`KEYS`, rank (1: the original is the nearest) and candidates of a federation's reconstructions; None where they
    were not measured.

    Raises:
        UsageError: the file is not as it was written.
    """
    return read_measured(out / FILE)


@lru_cache(maxsize=1)
def _lineup(data: DataConfig, side: int, seed: int, net: str, weights: Path | None) -> Lineup | None:
    """Embedded once for all federations of a call."""
    lpips = load_lpips(net, weights)
    if lpips is None or not lpips.fits((3, side, side)):
        return None
    test = shared_data(data, side, seed).test
    return Lineup(test.images(range(min(len(test), CANDIDATES - 1))), lpips)
