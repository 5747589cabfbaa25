"""What is rendered from the rows of clients that augment, and from those of false matches."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.rendering import Rendering, answered, csv, markdown_table, read_rows, spread_table
from fedmjp.records.rows import PROVENANCE, Schema

AGAINST = ("view", "photograph")
BY = ["model", "weights", "augmentation", "gamma", "attack", "updates", "against"]
STRANGERS = Schema(
    keys=(
        *PROVENANCE,
        "attack",
        "gamma",
        "batch_size",
        "images",
        "image_id",
        "pairs",
        "joined",
        "shared",
        "kept",
        "seconds",
    ),
    identity=("dataset", "model", "weights", "attack", "gamma", "batch_size", "images", "seed", "image_id"),
    optional={"shared": None, "kept": None},
)


def augmentation_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR and updates joined by augmentation, gamma, attack and what the answer is compared with."""
    rows = read_rows(folder)
    rows[["augmentation", "against"]] = rows["setting"].str.rsplit(": ", n=1, expand=True)
    rows["gamma"] = [parameters.get("gamma", 0.0) for parameters in rows["defense_parameters"]]
    rows["updates"] = rows["round"]
    rows["joined"] = [_joined(details) for details in rows["details"]]
    table = spread_table(rows, BY).set_index(BY)
    table["joined_mean"] = rows.groupby(BY, sort=False)["joined"].mean()
    return {"table.csv": csv(table.reset_index(), 4)}


def _joined(details: dict[str, float]) -> float:
    """Updates whose equations an answer rests on."""
    return max(float(details.get("updates", details.get("steps_used", 1))), 1.0)


def augmentation_block(folder: Path) -> str:
    """The table as Markdown: a row for each augmentation, a column for each attack and gamma."""
    table = pd.read_csv(folder / "table.csv")
    columns = list(dict.fromkeys(zip(table["gamma"], table["attack"], table["updates"], strict=True)))
    by = table.set_index(["augmentation", "gamma", "attack", "against"])
    heads = ["augmentation", *(_head(*column) for column in columns)]
    lines = []
    for name in dict.fromkeys(table["augmentation"]):
        cells = [_cell(by, name, gamma, attack) for gamma, attack, _ in columns]
        lines.append([name, *cells])
    return markdown_table(heads, lines)


def _head(gamma: float, attack: str, updates: int) -> str:
    who = f"γ {gamma:g}" if gamma else "batches of 2"
    return f"{who}, `{attack}`" if attack == "mjp_subspace" else f"{who}, `{attack}`, {updates} updates"


def _cell(by: pd.DataFrame, name: str, gamma: float, attack: str) -> str:
    """Median against the view and against the photograph, mean of updates joined; "" where nothing was run."""
    keys = [(name, gamma, attack, against) for against in AGAINST]
    if any(key not in by.index for key in keys):
        return ""
    view, original = (by.loc[key] for key in keys)
    joined = "" if attack == "mjp_subspace" else f"; {view.joined_mean:.1f} joined"
    return f"{view.psnr_median:.1f} / {original.psnr_median:.1f}{answered(view)}{joined}"


def withheld_block(folder: Path) -> str:
    """The table of updates without position gradient as Markdown; nothing was augmented."""
    table = pd.read_csv(folder / "table.csv")
    heads = ["model", "clients", "attack", "updates", "median (dB)", "first decile (dB)", "above 25 dB", "joined"]
    lines = [
        [
            row.model,
            f"MJP, γ {row.gamma:g}" if row.gamma else "batches of 2, no defence",
            f"`{row.attack}`",
            str(row.updates),
            f"{row.psnr_median:.1f}{answered(row)}",
            f"{row.psnr_first_decile:.1f}",
            f"{row.psnr_share_recognisable:.0%} of {row['count']}",
            f"{row.joined_mean:.1f}",
        ]
        for _, row in table[table["against"] == AGAINST[1]].iterrows()
    ]
    return markdown_table(heads, lines)


def stranger_files(folder: Path) -> dict[str, str]:
    """table.csv: pairs of updates of different images that were tested, and those that were joined."""
    rows = read_rows(folder, STRANGERS)
    grouped = rows.groupby(["model", "weights", "attack", "gamma", "batch_size", "images"], sort=False)
    sums = grouped[["pairs", "joined"]].sum()
    sums[["shared", "kept"]] = grouped[["shared", "kept"]].sum(min_count=1)
    sums = sums.assign(count=grouped.size(), seconds_median=grouped["seconds"].median())
    return {"table.csv": csv(sums.reset_index(), 4)}


def stranger_block(folder: Path) -> str:
    """The table as Markdown."""
    heads = [
        "attack",
        "updates of",
        "images of the client",
        "updates compared with all others",
        "pairs",
        "false matches",
        "of pairs that share an image, joined",
    ]
    lines = [
        [
            f"`{row.attack}`",
            f"{row.batch_size} images, no defence" if row.batch_size > 1 else f"one image, γ {row.gamma:g}",
            f"{row.images:,}",
            str(row["count"]),
            f"{row.pairs:,}",
            str(row.joined),
            "" if pd.isna(row.shared) else f"{row.kept:.0f} of {row.shared:.0f}",
        ]
        for _, row in pd.read_csv(folder / "table.csv").iterrows()
    ]
    return markdown_table(heads, lines)


AUGMENTATION = Rendering("augmentation", augmentation_files, {"augmentation": augmentation_block})
FALSE_MATCHES = Rendering("strangers", stranger_files, {"strangers": stranger_block})
WITHHELD_ROUNDS = Rendering("withheld_rounds", augmentation_files, {"withheld_rounds": withheld_block})
RENDERINGS = (AUGMENTATION, FALSE_MATCHES, WITHHELD_ROUNDS)
