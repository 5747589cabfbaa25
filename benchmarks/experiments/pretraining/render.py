"""What is rendered from the rows of pre-trainings: every cell, and the averages beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from experiments.pretraining.mst_render import MST
from experiments.pretraining.options import GAMMAS, GAMMAS_POS, PAPERS_REFERENCE, REFERENCE, TAUS
from experiments.pretraining.rows import ROWS
from experiments.pretraining.start_render import STARTS_TABLE
from experiments.rendering import Rendering, csv, markdown_table, read_rows
from experiments.scaffold import PAPER, RESULTS
from experiments.trainings.seeds import difference_cell, mean_cell, mean_over_seeds, paired_difference, seed_count
from experiments.trainings.verdicts import signs_in_words, with_verdicts

PAPERS_IMAGES = 200 * 1_281_167  # 200 epochs of ImageNet-1k


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training and case: mean over seeds and its 95 % interval (Student's), per cent, and the paper's."""
    paper = pd.read_csv(PAPER / "droppos_tables.csv").set_index(["line", "gamma", "gamma_pos"])["places"]
    lines = []
    for key, group in rows.groupby(["line", "gamma", "gamma_pos"], sort=False):
        case = dict(zip(("line", "gamma", "gamma_pos"), key, strict=True))
        lines.append(case | mean_over_seeds("places", group["accuracy"]) | {"paper_places": paper[key]})
    return pd.DataFrame(lines)


def averages(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training: the mean of the 16 cases over seeds, its difference from `REFERENCE`'s, and the paper's.

    Differences are taken seed by seed. The paper's are from its own default but for the lines that vary tau, which are
    compared with the same line as ours. `paper_places` is the mean of the paper's cells and `paper_printed_places` the
    average that it prints, which differs for the default.
    """
    paper = pd.read_csv(PAPER / "droppos_tables.csv").groupby("line")["places"].mean()
    printed = pd.read_csv(PAPER / "droppos_averages.csv").set_index("line")["printed_places"]
    by_seed = rows.groupby(["line", "seed"], sort=False)["accuracy"].mean()
    lines = []
    for name in rows["line"].unique():
        own = by_seed[name]
        line = {"line": name} | mean_over_seeds("places", own)
        line |= {"paper_places": paper[name], "paper_printed_places": printed[name]}
        if name != REFERENCE and REFERENCE in by_seed:
            theirs = paper[name] - paper[REFERENCE if name in TAUS else PAPERS_REFERENCE]
            line |= paired_difference(own, by_seed[REFERENCE], theirs)
        lines.append(line)
    return with_verdicts(pd.DataFrame(lines))


def table_text(rows: pd.DataFrame) -> str:
    """table.md: the averages, and what such trainings cannot show."""
    table, lines = averages(rows), []
    for _, row in table.iterrows():
        cells = [mean_cell(row, "places"), f"{row['paper_places']:.1f}", difference_cell(row)]
        lines.append([f"`{row['line']}`", *cells])
    heads = ["pre-training", "places (%)", "paper (mean of its cells)", f"from `{REFERENCE}`"]
    return f"{markdown_table(heads, lines)}\n\n{limits(rows)} {signs_in_words(table)}".rstrip() + "\n"


def cells_text(rows: pd.DataFrame) -> str:
    """cells.md: Tables S1 to S3, two lines a training, ours and the paper's."""
    found = cells(rows).set_index(["line", "gamma", "gamma_pos"])
    lines = []
    for name in rows["line"].unique():
        for title, column in ((f"`{name}`", "places_mean"), ("the paper's", "paper_places")):
            own = found[column]
            lines.append(
                [title, *(" / ".join(f"{own[name, gamma, share]:.0f}" for share in GAMMAS_POS) for gamma in GAMMAS)]
            )
    return markdown_table(["pre-training", *(f"gamma {gamma:g}" for gamma in GAMMAS)], lines) + "\n"


def limits(rows: pd.DataFrame) -> str:
    """What the table cannot show, with figures from the rows."""
    seen, patches = (sorted(set(rows[name])) for name in ("images_seen", "patches"))
    least = rows[rows["gamma_pos"] == 0.95]
    anchors = int((least["seen"] - least["hidden"]).min())
    tests, seeds = rows["images"].iloc[0], seed_count(rows.groupby("line")["seed"].nunique())
    return (
        f"Means of 16 cases, {tests:,} test images, {seeds} (brackets: Student's 95 % interval); each training saw "
        f"{' or '.join(f'{n:,}' for n in seen)} images ({'; '.join(sorted(set(rows['provenance'])))}), the paper's see "
        f"{PAPERS_IMAGES:,} at 196 patches an image. Chance is {100 / patches[0]:.1f} %. Where the paper hides most "
        f"(gamma 0.75, gamma_pos 0.95) it leaves 2 anchors, these leave {anchors}. All but `default` (tau 0.1) and "
        "`tau_0.5` have tau = inf, where the paper has 0.1; its differences are from its default, and of tau from "
        "`tau_inf`. It prints 87.83 as the default's average, but the cells that it prints average 88.50."
    )


def files(folder: Path) -> dict[str, str]:
    """cells.csv, table.csv, table.md and cells.md."""
    rows = read_rows(folder, ROWS)
    texts = {"table.md": table_text(rows), "cells.md": cells_text(rows)}
    return {"cells.csv": csv(cells(rows), 5), "table.csv": csv(averages(rows), 5), **texts}


def _block(name: str) -> Callable[[Path], str]:
    return lambda folder: (folder / f"{name}.md").read_text(encoding="utf-8").strip()


DROPPOS = Rendering("droppos", files, {"droppos": _block("table"), "droppos_cells": _block("cells")})
# Rendered into the pages once results are committed.
RENDERINGS = tuple(one for one in (DROPPOS, MST, STARTS_TABLE) if (RESULTS / one.folder).is_dir())
