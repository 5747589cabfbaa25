"""What is rendered from the rows of the table that compares what a fine-tuning starts from.

Two uncertainties are given, as in `experiments.trainings.seeds`: intervals are Student's over seeds; `one_seed_margin`
and `difference_margin` are half the bootstrap interval over the test images of one training, of differences over what
both answer on the same image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from attacks.registry import UsageError
from experiments.pretraining.start_options import DEFENCES, SCRATCH
from experiments.rendering import MEAN, Rendering, csv, markdown_table, read_rows
from experiments.trainings.seeds import change_cell, mean_cell, mean_over_seeds, paired_difference, seed_count
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import Schema

# `defense` is "" in the row of a pre-training, whose `accuracy` counts `accuracy_of`. `right` has a bit for each test
# image that is answered correctly, in hexadecimal.
ROWS = Schema(
    keys=(
        *("training", "start", "objective", "defense", "gamma", "seed", "accuracy", "accuracy_of", "right", "images"),
        *("model", "dataset", "train_limit", "recipe", "precision", "train_loss", "steps", "images_seen"),
        *("train_seconds", "parameters", "weights", "provenance", "run_id", "commit", "version", "torch_version"),
        "device",
    ),
    identity=("training",),
)
WORDS = {
    SCRATCH: "random weights",
    "supervised": "supervised, with the labels of all its images",
    "mp3": "MP3",
    "droppos": "DropPos",
    "mst": "MST",
}


def answers(rows: pd.DataFrame, start: str, defense: str) -> pd.DataFrame:
    """What a line's trainings answer: test images by seed, 100 where right and 0 where not."""
    own = rows[(rows["start"] == start) & (rows["defense"] == defense)]
    found = {
        row.seed: 100.0 * np.unpackbits(np.frombuffer(bytes.fromhex(row.right), dtype=np.uint8))[: row.images]
        for row in own.itertuples()
    }
    return pd.DataFrame(found)


def comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a start and defence: accuracy, and the difference from the line in `against` (per cent).

    Plain lines are compared with random weights, lines under MJP with the plain line of the same start.
    """
    lines = []
    for start in rows["start"].unique():
        for defense in DEFENCES:
            own, other = answers(rows, start, defense), (SCRATCH, "none") if defense == "none" else (start, "none")
            if own.empty:
                continue
            line = {"start": start, "defense": defense} | mean_over_seeds("accuracy", own.mean())
            line |= {"one_seed_margin": _margin(own), "against": ""}
            reference = answers(rows, *other)
            shared = own.columns.intersection(reference.columns)
            if other != (start, defense) and len(shared):
                line |= {"against": ", ".join(other)} | paired_difference(own.mean(), reference.mean())
                line["difference_margin"] = _margin(own[shared] - reference[shared])
            lines.append(line)
    columns = ["start", "defense", *(f"accuracy{part}" for part in MEAN), "seeds", "one_seed_margin", "against"]
    columns += [*(f"difference{part}" for part in MEAN), "difference_margin"]
    return pd.DataFrame(lines).reindex(columns=columns)


def _margin(values: pd.DataFrame) -> float:
    """Half the bootstrap interval over the test images (rows) of each seed (columns), averaged over seeds."""
    found = [bootstrap_mean(values[seed].to_numpy()) for seed in values]
    return float(np.mean([(one.high - one.low) / 2 for one in found]))


def table_text(rows: pd.DataFrame) -> str:
    """table.md: a row a start."""
    table, lines = comparison(rows).set_index(["start", "defense"]), []
    for start in rows["start"].unique():
        own = rows[(rows["start"] == start) & (rows["defense"] == "")]
        learned = f"{own['accuracy'].mean():.1f} % of {own['accuracy_of'].iloc[0]}" if len(own) else ""
        cells = [WORDS[start], learned]
        for defense in DEFENCES:
            known = (start, defense) in table.index
            row = table.loc[(start, defense)] if known else None
            cells += [mean_cell(row, "accuracy"), change_cell(row)] if known else ["", ""]
        lines.append(cells)
    heads = ["start", "what the pre-training found", "accuracy (%)", "from random weights"]
    text = markdown_table([*heads, "under MJP (%)", "from without MJP"], lines)
    pre, fine = (rows[rows["defense"].eq("") == own] for own in (True, False))
    gamma, first = rows["gamma"].dropna().iloc[0], fine.iloc[0]
    seen = "".join(
        f"{images:,} images seen in pre-training ({limit:,} different ones), "
        for images, limit in pre[["images_seen", "train_limit"]].drop_duplicates().itertuples(index=False)
    )
    return (
        f"{text}\n\n{first['model']} on {first['dataset']} ({first['provenance']}): {seen}{first['images_seen']:,} in "
        f"fine-tuning ({first['train_limit']:,} of the same ones), MJP with gamma {gamma:g} in fine-tuning alone. "
        f"{seed_count(table['seeds'])}; brackets: Student's 95 % interval over seeds, differences paired by seed; ±: "
        f"of one seed, over {first['images']:,} test images alone, of differences over what both answer on the same "
        "image.\n"
    )


def files(folder: Path) -> dict[str, str]:
    """table.csv and table.md.

    Raises:
        UsageError: the folder holds trainings by several recipes.
    """
    rows = read_rows(folder, ROWS)
    if rows.duplicated(["start", "defense", "seed"]).any():
        raise UsageError(f"{folder} holds trainings by several recipes; pass another --out for each")
    return {"table.csv": csv(comparison(rows), 5), "table.md": table_text(rows)}


STARTS_TABLE = Rendering(
    "pretraining", files, {"pretraining": lambda folder: (folder / "table.md").read_text(encoding="utf-8").strip()}
)
