"""What is rendered from the rows of segmentation."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, interval, markdown_table, read_rows
from experiments.scaffold import PAPER
from experiments.segmentation.options import lines_of
from experiments.trainings.seeds import difference_cell, mean_over_seeds, paired_difference
from experiments.trainings.verdicts import signs_in_words, with_verdicts
from fedmjp.records.rows import Schema

COLOUR = "colour alone"
METRICS = {"miou": "mean IoU (%)", "macc": "mean accuracy (%)"}
# One row a line and seed; `iou` lists the IoU of each class.
ROWS = Schema(
    keys=(
        *("line", "model", "pretraining", "defense", "gamma", "seed", *METRICS, "iou", "test_loss", "train_loss"),
        *("recipe", "images_seen", "train_seconds", "parameters", "weights", "provenance", "run_id"),
        *("commit", "version", "torch_version", "device"),
    ),
    identity=("line", "seed"),
)


def segmentation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training and metric.

    Args:
        rows: of `ROWS`.

    Returns:
        columns line, metric, value_mean, value_low, value_high (Student's 95 % interval over seeds), seeds, against,
        difference_mean, difference_low, difference_high (paired by seed), paper_difference, difference_p and verdict
        (`trainings.verdicts`).
    """
    models = tuple(dict.fromkeys(line.split(",")[0] for line in rows["line"] if line != COLOUR))
    against = {line.name: line.against for line in lines_of(models, models)}
    paper = pd.read_csv(PAPER / "mjp_supplement_table3.csv").set_index("line")
    by_line = {name: group.set_index("seed") for name, group in rows.groupby("line", sort=False)}
    lines = []
    for name, group in by_line.items():
        for metric in METRICS:
            line = {"line": name, "metric": metric} | mean_over_seeds("value", group[metric])
            line["against"] = against.get(name, "")
            if line["against"] in by_line:
                theirs = math.nan
                if name.endswith("pre-trained with MJP") and name.startswith("swin"):
                    theirs = paper.loc["Swin-Tiny + MJP", metric] - paper.loc["Swin-Tiny", metric]
                line |= paired_difference(group[metric], by_line[line["against"]][metric], theirs)
            lines.append(line)
    return with_verdicts(pd.DataFrame(lines))


def segmentation_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(segmentation_table(read_rows(folder, ROWS)), 5)}


def segmentation_block(folder: Path) -> str:
    """The table as Markdown, a line a training."""
    heads = ["trained", "seeds"]
    for words in METRICS.values():
        heads += [words, "difference"]
    lines = []
    table = pd.read_csv(folder / "table.csv")
    for name, group in table.groupby("line", sort=False):
        own = group.set_index("metric")
        cells = [str(name), str(group["seeds"].iloc[0])]
        for metric in METRICS:
            row = own.loc[metric]
            cells += [interval(row, "value", 1), difference_cell(row)]
        lines.append(cells)
    return f"{markdown_table(heads, lines)}\n\n{signs_in_words(table)}".rstrip()


SEGMENTATION = Rendering("segmentation", segmentation_files, {"segmentation": segmentation_block})
RENDERINGS = (SEGMENTATION,)
