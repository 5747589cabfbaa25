"""What is rendered from the rows of pieces put back in their places."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_one_seed
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import PROVENANCE, Schema

EXACT = 120.0  # `level` of pieces as they are: the most that PSNR resolves, since rows hold no infinity
RECOGNISABLE = 20.0  # dB
BY = ["pieces", "image_size", "restarts", "gamma", "level"]
SCHEMA = Schema(
    keys=(
        *PROVENANCE,
        *("solver", *BY, "image_id", "hidden", "in_place", "neighbours", "psnr", "seconds"),
    ),
    identity=("dataset", "weights", "solver", *BY, "seed", "image_id"),
)


def placement_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a solver and way of scrambling: BY, solver, share of the scrambled pieces in their places and PSNR.

    Columns in_place_mean, _low, _high (95 % bootstrap interval over images), psnr_mean and psnr_median, count,
    seconds_median; and for other solvers than border, in_place_difference_mean, _low, _high, paired with border.
    """
    rows = rows.astype({"level": float, "in_place": float, "neighbours": float, "psnr": float})
    lines = []
    for key, group in rows.groupby(BY, sort=False):
        by_solver = {name: own.set_index("image_id") for name, own in group.groupby("solver", sort=False)}
        for solver, own in by_solver.items():
            found = bootstrap_mean(own["in_place"].to_numpy())
            line = dict(zip(BY, key, strict=True)) | {"solver": solver}
            line |= {"in_place_mean": found.mean, "in_place_low": found.low, "in_place_high": found.high}
            line["placed"] = (own["psnr"] > RECOGNISABLE).mean()
            line["neighbours_mean"] = own["neighbours"].mean()
            line |= {"psnr_mean": own["psnr"].mean(), "psnr_median": own["psnr"].median()}
            change = (np.nan,) * 3
            if solver != "border" and "border" in by_solver:
                paired = bootstrap_mean((own["in_place"] - by_solver["border"]["in_place"]).to_numpy())
                change = paired.mean, paired.low, paired.high
            line |= {f"difference{part}": number for part, number in zip(MEAN, change, strict=True)}
            lines.append(line | {"count": len(own), "seconds_median": own["seconds"].median()})
    order = ["pieces", "gamma", "level"]
    return pd.DataFrame(lines).sort_values(order, ascending=[True, False, True], kind="stable")


def placement_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(placement_table(read_one_seed(folder, SCHEMA)), 4)}


def placement_block(folder: Path) -> str:
    """One line a way of scrambling: every solver's share in place and PSNR, and what both gain over borders."""
    table = pd.read_csv(folder / "table.csv")
    solvers = [name for name in ("border", "learned", "both") if name in set(table["solver"])]
    lines = []
    for (pieces, size, _, gamma, level), group in table.groupby(BY, sort=False):
        own = group.set_index("solver")
        cells = [f"{pieces} of {size // math.isqrt(pieces)} pixels", f"{gamma:.0%}"]
        cells.append("exact" if level >= EXACT else f"{level:g} dB")
        for solver in solvers:
            cells.append(_cell(own.loc[solver]) if solver in own.index else "")
        gain = 100 * own.loc["both", [f"difference{part}" for part in MEAN]] if "both" in own.index else None
        cells.append("" if gain is None else interval(gain, "difference", 0))
        lines.append([*cells, f"{own['count'].max()}"])
    heads = ["pieces", "scrambled", "degraded to", *(f"`{name}`" for name in solvers)]
    return markdown_table([*heads, "`both` above `border` (points)", "images"], lines)


def _cell(line: pd.Series) -> str:
    return f"{line.in_place_mean:.0%}, {line.neighbours_mean:.0%}, {line.psnr_mean:.1f} dB"


PLACEMENT = Rendering("placement", placement_files, {"placement": placement_block})
RENDERINGS = (PLACEMENT,)
