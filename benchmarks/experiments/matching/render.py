"""What is rendered from the rows of gradient matching."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.matching.table import matching_figure, matching_table
from experiments.matching.tuning_table import TUNING
from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows
from fedmjp.audit.verdict import Answer
from fedmjp.report.flags import with_table_flags


def rendered_table(folder: Path) -> pd.DataFrame:
    """`matching_table` of the folder's rows."""
    return matching_table(with_table_flags(read_rows(folder)))


def matching_files(folder: Path) -> dict[str, str]:
    """table.csv."""
    return {"table.csv": csv(rendered_table(folder), 4)}


def matching_block(folder: Path) -> str:
    """Leakage of the original images, a line an attack and start, a column a kind of client.

    Clients under a defence are shown with batches of one.
    """
    table = pd.read_csv(folder / "table.csv", keep_default_na=False)
    table = table[(table["setting"] == "original") & ((table["defense"] == "none") | (table["batch_size"] == 1))]
    table = table.sort_values("steps", kind="stable")
    keys = ["defense", "gamma", "batch_size"]
    kinds = list(dict.fromkeys(table[keys].itertuples(index=False, name=None)))
    lines = []
    for (attack, init, steps), group in table.groupby(["attack", "init", "steps"], sort=False):
        own = {key: row for key, row in zip(group[keys].itertuples(index=False, name=None), group.iloc, strict=True)}
        name = f"`{attack}`" + (f" from `{init}`" if init not in ("", "randn") else "")
        lines.append([name, str(steps or "–"), *(_cell(own[kind]) if kind in own else "" for kind in kinds)])
    return markdown_table(["attack", "steps", *(_head(*kind) for kind in kinds)], lines)


def _cell(row: pd.Series) -> str:
    mean, bounds = interval(row, "psnr", 1, MEAN).split(" ", 1)
    mark = "**" if row["verdict"] in (Answer.LEAKS, Answer.PARTLY) else ""
    return f"{mark}{mean}{mark} {bounds}"


def _head(defense: str, gamma: float, batch: int) -> str:
    if defense == "none":
        return f"batch of {batch}"
    return ("MJP" if defense == "mjp" else defense) + (f" γ = {gamma}" if gamma else "")


def rendering(folder: str, **blocks) -> Rendering:
    """The rendering of one folder of gradient matching."""
    return Rendering(
        folder, matching_files, blocks, lambda out: matching_figure(rendered_table(out), out / "matching.png")
    )


RENDERINGS = (
    rendering("gradient_matching/vit_mini_32", matching=matching_block),
    rendering("gradient_matching/vit_mini_32_trained", matching_trained=matching_block),
    rendering("gradient_matching/vit_mini_32_long", matching_long=matching_block),
    rendering("gradient_matching/vit_mini_32_tuned", matching_tuned=matching_block),
    rendering("gradient_matching/vit_mini_32_long_tuned", matching_long_tuned=matching_block),
    rendering("gradient_matching/vit_mini_64_trained"),
    rendering("gradient_matching/vit_ti_trained", matching_vit_ti=matching_block),
    TUNING,
)
