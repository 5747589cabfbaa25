"""A log of as many rows as are asked for, from those of a real run."""

from __future__ import annotations

import json
import random
import shutil
from itertools import count as numbers
from itertools import islice
from pathlib import Path

from fedmjp.records.sums import Appender

MOST = 120.0  # dB, the largest PSNR of a row


def write_log(source: Path, folder: Path, count: int, seed: int = 0) -> None:
    """Write rows.jsonl with its checksums, run.json and rounds.csv: the rows of a run repeated over further clients.

    Every repetition has clients and images of its own. Its PSNR is moved by 3 dB (standard deviation) for all of its
    rows and by 1 dB for each, the MSE follows, and the other scores are moved by up to a tenth of themselves.

    Args:
        source: folder of the run; its rows.jsonl is not packed.
        folder: an existing one to write to.
        count: rows.
        seed: fixes what is drawn.
    """
    with (source / "rows.jsonl").open(encoding="utf-8") as file:
        known = [json.loads(line) for line in file]
    clients, draw = 1 + max(row["client"] for row in known), random.Random(seed)
    log = Appender(folder / "rows.jsonl", b"")
    repeated = ((number, row) for number in numbers() for row in known)
    for number, row in islice(repeated, count):
        if row is known[0]:
            shift = draw.gauss(0, 3)
        moved = {"client": row["client"] + clients * number, "image_id": f"{row['image_id']}/{number}"}
        if row["psnr"] is not None:
            psnr = min(MOST, row["psnr"] + shift + draw.gauss(0, 1))
            moved |= {"psnr": psnr, "mse": 10 ** (-psnr / 10)}
            moved |= {name: row[name] * draw.uniform(0.9, 1.1) for name in ("ssim", "fft2d", "lpips") if row[name]}
        log.append(json.dumps(row | moved, ensure_ascii=False).encode())
    log.close()
    for name in ("run.json", "rounds.csv"):
        shutil.copyfile(source / name, folder / name)
