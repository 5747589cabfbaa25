"""What is rendered from the rows of a server that sets layers of the model that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from attacks import ATTACKS
from experiments.fishing.render import PASSIVE, size_cell, summary
from experiments.rendering import Rendering, answered, csv, markdown_table, read_rows
from fedmjp.records.rows import BASELINES
from fedmjp.report.words import defence_words

BAR = 30.0  # dB, of a single image that has come back
LINE = ["dataset", "model", "weights", "defense", "batch_size", "seed"]
IMAGES = {"cifar10": "CIFAR-10", "tiny-imagenet": "Tiny-ImageNet", "photos": "photographs"}


def imprint_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR and images by case and attack."""
    rows = read_rows(folder)
    rows = rows.assign(attack=[_named(*both) for both in zip(rows["attack"], rows["attack_parameters"], strict=True)])
    return {"table.csv": csv(pd.DataFrame([_line(*both) for both in rows.groupby([*LINE, "attack"], sort=False)]), 4)}


def imprint_block(folder: Path) -> str:
    """The table of the active attacks as Markdown, a line for each case."""
    table = pd.read_csv(folder / "table.csv")
    table = table[~table["attack"].isin((*BASELINES, PASSIVE))]
    table = table.sort_values("attack", kind="stable", key=lambda names: names.map(lambda name: name.split()[0]))
    heads = ["attack", "images", "model", "defence", "batch", "rounds"]
    heads += ["above 30 dB", "PSNR, median (dB)", "vouched for", "least of them (dB)"]
    lines = []
    for row in table.to_dict("records"):
        name, _, settings = row["attack"].partition(" ")
        weights = "random" if "NOT TRAINED" in row["weights"] else "trained"
        lines.append(
            [
                f"`{name}` {settings}".strip(),
                IMAGES.get(row["dataset"], "ImageNet"),
                f"{row['model']}, {weights}",
                defence_words(row["defense"]),
                size_cell(row["batch_size"], row["seed"], table),
                str(row["rounds"]),
                f"{row['above_30']} of {row['count']}",
                f"{row['psnr_median']:.1f}{answered(row)}" if row["failed"] < row["count"] else "no image",
                str(row["whole"]),
                f"{row['psnr_whole']:.1f}" if row["whole"] else "",
            ]
        )
    return markdown_table(heads, lines)


def passive_block(folder: Path) -> str:
    """The same batches and a model sent as it is, in a sentence."""
    table = pd.read_csv(folder / "table.csv")
    own = table[(table["attack"] == PASSIVE) & (table["batch_size"] > 1) & (table["defense"] == "none")]
    guess = table[(table["attack"] == "mean_image") & (table["batch_size"] > 1)]
    return (
        f"With the same batches and the model as it is, `{PASSIVE}` returns a mixture: medians of "
        f"{own['psnr_median'].min():.1f} to {own['psnr_median'].max():.1f} dB; the mean image has "
        f"{guess['psnr_median'].min():.1f} to {guess['psnr_median'].max():.1f} dB."
    )


def _line(key: tuple, own: pd.DataFrame) -> dict[str, Any]:
    """A line of the table; images that did not come back count in no statistic but the number."""
    whole = own[own["details"].map(lambda details: bool(details["vouched"]))]["psnr"]
    return (
        dict(zip([*LINE, "attack"], key, strict=True))
        | summary(own)
        | {"above_30": int((own["psnr"] > BAR).sum()), "whole": len(whole), "psnr_whole": whole.min()}
    )


def _named(attack: str, parameters: Mapping[str, Any]) -> str:
    """The attack, with the settings that are not its own, in words."""
    if attack in (*BASELINES, PASSIVE):
        return attack
    usual = ATTACKS.get(attack)().parameters()
    changed = {name: value for name, value in parameters.items() if usual[name] != value}
    words = (name if value is True else f"{value:g} {name}" for name, value in changed.items())
    return f"{attack} {', '.join(words)}".strip()


IMPRINT = Rendering("imprint", imprint_files, {"imprint": imprint_block, "imprint_passive": passive_block})
RENDERINGS = (IMPRINT,)
