"""What is rendered from the rows of speech."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, csv, interval, markdown_table, read_rows
from experiments.scaffold import PAPER
from experiments.speech.options import SUPERVISED
from experiments.trainings.seeds import difference_cell, mean_over_seeds, paired_difference
from experiments.trainings.verdicts import signs_in_words, with_verdicts
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import Schema

_SHARED = ("model", "weights", "seed", "provenance", "run_id", "commit", "version", "torch_version", "device")
# One row a line and seed.
TRAININGS = Schema(
    keys=(
        *("line", "pretraining_epochs", "given", "place_accuracy", "accuracy", "test_loss", "train_loss", "recipe"),
        *("words_seen", "train_seconds", "parameters", *_SHARED),
    ),
    identity=("line", "seed"),
)
# One row an update; `explained` is the share of the frames' variance around their mean, in per cent, `rmse` in units of
# [0, 1].
LEAKS = Schema(
    keys=("width", "positions", "attack", "word", "explained", "rmse", "rank", "diagnosis", "seconds", *_SHARED),
    identity=("width", "positions", "attack", "word"),
)


def speech_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training: accuracy with Student's 95 % interval over seeds, and the difference from the supervised
    one, paired by seed, beside the paper's on Speech Commands.
    """
    by_line = {name: group.set_index("seed") for name, group in rows.groupby("line", sort=False)}
    paper = pd.read_csv(PAPER / "mp3_speech.csv").set_index("line")["accuracy"]
    theirs, lines = paper["Transformer + MP3"] - paper["Transformer"], []
    for name, group in by_line.items():
        line = {"line": name} | mean_over_seeds("accuracy", group["accuracy"])
        line["place_accuracy"] = group["place_accuracy"].astype(float).mean()
        if name != SUPERVISED and SUPERVISED in by_line:
            line |= paired_difference(group["accuracy"], by_line[SUPERVISED]["accuracy"], theirs)
        lines.append(line)
    return with_verdicts(pd.DataFrame(lines))


def speech_block(folder: Path) -> str:
    """The table as Markdown, with the paper's figures on Speech Commands under it."""
    table, lines = pd.read_csv(folder / "table.csv"), []
    for _, row in table.iterrows():
        places = "" if pd.isna(row["place_accuracy"]) else f"{row['place_accuracy']:.1f}"
        lines.append([row["line"], str(row["seeds"]), interval(row, "accuracy", 1), difference_cell(row), places])
    heads = ["trained", "seeds", "accuracy (%)", "difference", "places after MP3 (%)"]
    paper = pd.read_csv(PAPER / "mp3_speech.csv").itertuples(index=False)
    return markdown_table(heads, lines) + (
        "\n\nThe paper on Speech Commands, twelve classes: "
        + ", ".join(f"{name} {accuracy:g} %" for name, accuracy in paper)
        + f". {signs_in_words(table)}".rstrip()
    )


def leak_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a width and kind of positions; figures are empty where the attack gives no answer."""
    lines = []
    for (width, positions), group in rows.groupby(["width", "positions"], sort=False):
        line = {"channels": width, "positions": positions, "count": len(group)}
        line["rank"] = group["rank"].astype(float).median()
        answered = group["explained"].dropna().astype(float)
        if len(answered):
            found = bootstrap_mean(answered.to_numpy())
            line |= {"explained_mean": found.mean, "explained_low": found.low, "explained_high": found.high}
        line["diagnosis"] = group["diagnosis"].mode().iloc[0]
        lines.append(line)
    return pd.DataFrame(lines)


def leak_block(folder: Path) -> str:
    """The table as Markdown."""
    lines = []
    for _, row in pd.read_csv(folder / "table.csv", keep_default_na=True).iterrows():
        open_ = pd.isna(row["explained_mean"])
        cells = ["no answer" if open_ else interval(row, "explained", 1), "" if open_ else f"{row['rank']:.0f}"]
        diagnosis = "" if pd.isna(row["diagnosis"]) else row["diagnosis"]
        lines.append([f"{row['channels']}", row["positions"], *cells, f"{row['count']}", diagnosis])
    heads = ["channels D", "positions", "variance explained (%)", "frames solved for", "words", "the attack says"]
    return markdown_table(heads, lines)


SPEECH = Rendering(
    "speech",
    lambda folder: {"table.csv": csv(speech_table(read_rows(folder, TRAININGS)), 5)},
    {"speech": speech_block},
)
LEAK = Rendering(
    "speech_leak",
    lambda folder: {"table.csv": csv(leak_table(read_rows(folder, LEAKS)), 5)},
    {"speech_leak": leak_block},
)
RENDERINGS = (SPEECH, LEAK)
