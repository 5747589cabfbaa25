"""The leakage table in the layout of the MJP paper's Table 5: models by setting, one table a block and attack.

Rows of several seeds are first averaged image by image, so that the interval is over images. The paper's own figures
are given with the attack and block that it used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from attacks.registry import UsageError
from experiments.rendering import markdown_table
from fedmjp.records.rows import BASELINES, METRICS
from fedmjp.report.tables import (
    DIGITS,
    escape,
    heading,
    images_text,
    interval_text,
    latex_heading,
    latex_value,
    summarise,
)

BY = ("block", "attack", "setting", "line", "model", "weights", "precision", "threat_model")
COLUMNS = ("mse", "fft2d_official", "fft2d", "psnr", "ssim", "lpips")
# Whose protocol the paper used: the `breaching` package's attack on its own first block.
PAPER_BLOCK, PAPER_ATTACK = "april", "april"
# The adversary's usual means; those beyond them are named with the model.
USUAL = {"model_weights", "position_gradient", "several_rounds", "modified_model"}


def leakage_table(
    rows: pd.DataFrame, accuracy: Mapping[tuple[str, str, str, str], float], paper: pd.DataFrame
) -> pd.DataFrame:
    """One line a block, attack, setting and model; guesses without a gradient come last, in block "".

    Args:
        rows: as `load_rows` gives them, of a campaign.
        accuracy: (model, weights, block, setting) -> top-1 accuracy in per cent, where the weights were trained for the
            labels.
        paper: columns model, setting, accuracy and the metrics.

    Raises:
        UsageError: rows that differ in what the table does not show (an attack's parameters, gamma).

    Returns:
        The columns `BY`, those of `summarise`, `condition_median` (condition number of the system solved), `accuracy`,
        and `paper_M` for each column M that the paper gives.
    """
    rows = _one_row_an_image(labelled(rows))
    table = summarise(rows, BY)
    table["condition_median"] = rows.groupby(list(BY), sort=False)["condition"].median().to_numpy()
    keys = table[["model", "weights", "block", "setting"]].itertuples(index=False, name=None)
    table["accuracy"] = [accuracy.get(key, np.nan) for key in keys]
    theirs = paper.set_index(["model", "setting"]).add_prefix("paper_")
    table = table.join(theirs, on=["model", "setting"])
    # The paper's one figure for a model that sends no gradient per token belongs to the row that has one.
    other = table["count"] == table["failed"]
    other |= (table["block"] != PAPER_BLOCK) | (table["attack"] != PAPER_ATTACK) | (table["precision"] == "float64")
    table.loc[other, list(theirs.columns)] = np.nan
    order = {block: place for place, block in enumerate(("april", "standard", ""))}
    places = [table["block"].map(order), table["attack"].map(_place(table["attack"])), table["setting"]]
    return table.iloc[np.lexsort([p.rank(method="dense") for p in reversed(places)])].reset_index(drop=True)


def labelled(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the columns `line` (the model's label) and `condition`, and with text for weights and threat model."""
    rows = rows.assign(
        weights=[re.sub(r" \(seed \d+\)", "", w) for w in rows["weights"]],
        threat_model=[", ".join(t) for t in rows["threat_model"]],
        condition=[float(d.get("condition", np.nan)) for d in rows["details"]],
    )
    values = rows[["model", "weights", "precision", "threat_model"]].itertuples(index=False)
    return rows.assign(line=[_label(*v) for v in values])


def leakage_text(table: pd.DataFrame, block: str) -> Table:
    """One block's table for a terminal: mean [95 % interval], and the paper's figures on a line of their own."""
    own = _of_block(table, block)
    shown = [m for m in _shown(table) if m != "fft2d"]
    weights = dict.fromkeys(f"{n}: {w}" for n, w in zip(own["model"], own["weights"], strict=True) if w)
    lines = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{block} block",
        caption="Weights of " + "; ".join(weights),
        caption_justify="left",
    )
    lines.add_column("Attack, setting\n  model", no_wrap=True)
    lines.add_column("Images", justify="right")
    for column in ("Acc. (%)", *(heading(m).replace(" ", "\n", 1) for m in shown)):
        lines.add_column(column, justify="right", no_wrap=True)
    for (attack, setting), group in own.groupby(["attack", "setting"], sort=False):
        guess = attack in BASELINES
        if not guess:
            lines.add_row(Text(f"{attack}, ({setting})", "bold"))
        for line in group.to_dict("records"):
            cells = [
                f"{attack} {line['line']}" if guess else f"  {line['line']}",
                images_text(line),
                _number(line["accuracy"], 1),
            ]
            lines.add_row(*map(Text, [*cells, *(interval_text(line, m, "\n") for m in shown)]))
            if not np.isnan(line["paper_psnr"]):
                paper = ["    paper", "", _number(line["paper_accuracy"], 1)]
                paper += [_number(line.get(f"paper_{m}", np.nan), DIGITS[m]) for m in shown]
                lines.add_row(*(Text(cell, "dim") for cell in paper))
        lines.add_section()
    return lines


def leakage_latex(table: pd.DataFrame, block: str) -> str:
    """One block's table body (needs booktabs); the paper's figures in parentheses under ours."""
    shown = _shown(table)
    head = ["Model", "$n$", r"Acc. $\uparrow$", *map(latex_heading, shown)]
    lines = [
        "% Mean and half the 95 % bootstrap interval over images; (paper's figure).",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
    ]
    for (attack, setting), group in _of_block(table, block).groupby(["attack", "setting"], sort=False):
        title = f"{escape(attack)}, setting ({escape(setting)})"
        lines += [r"\midrule", rf"\multicolumn{{{len(head)}}}{{l}}{{\emph{{{title}}}}} \\"]
        for line in group.to_dict("records"):
            cells = [escape(line["line"]), images_text(line), _number(line["accuracy"], 1).replace("–", "--")]
            lines.append(" & ".join([*cells, *(latex_value(line, m) for m in shown)]) + r" \\")
            if not np.isnan(line["paper_psnr"]):
                paper = [f"({line['paper_accuracy']:.1f})"]
                paper += [_number(line.get(f"paper_{m}", np.nan), DIGITS[m], "({})") for m in shown]
                lines.append(" & ".join(["", "", *(cell.replace("–", "") for cell in paper)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def leakage_markdown(table: pd.DataFrame, block: str) -> str:
    """One block's table for a README: PSNR with its interval, SSIM, LPIPS, the condition number, the paper's PSNR."""
    lines = []
    for line in _of_block(table, block).to_dict("records"):
        condition = "–" if np.isnan(line["condition_median"]) else f"{line['condition_median']:.0e}"
        cells = [f"`{line['attack']}`", f"({line['setting']})", line["line"], images_text(line)]
        cells += [interval_text(line, "psnr", digits=1), _number(line["paper_psnr"], 1)]
        lines.append([*cells, _number(line["ssim_mean"], 2), _number(line["lpips_mean"], 2), condition])
    heads = ["attack", "setting", "model", "images", "PSNR (dB)", "paper", "SSIM", "LPIPS", "condition"]
    return markdown_table(heads, lines)


def _of_block(table: pd.DataFrame, block: str) -> pd.DataFrame:
    return table[table["block"].isin([block, ""])]


def _shown(table: pd.DataFrame) -> list[str]:
    return [m for m in COLUMNS if table[f"{m}_mean"].notna().any()]


def _number(value: float, digits: int, shape: str = "{}") -> str:
    return "–" if np.isnan(value) else shape.format(f"{value:.{digits}f}")


def _label(model: str, weights: str, precision: str, threat_model: str) -> str:
    """A model's name with what is out of the ordinary about it."""
    notes = [] if "NOT TRAINED" in weights or not weights else ["trained"]
    notes += sorted(set(threat_model.split(", ")) - USUAL - {""})
    notes += ["float64"] if precision == "float64" else []
    return model + (f" ({', '.join(notes)})" if notes else "")


def _place(attacks: pd.Series) -> dict[str, int]:
    """Order of first appearance, guesses last."""
    names = list(dict.fromkeys(attacks))
    return {name: place for place, name in enumerate(sorted(names, key=lambda n: n in BASELINES))}


def _one_row_an_image(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of each image's numbers."""
    if rows["dataset"].nunique() > 1:
        names = ", ".join(sorted(rows["dataset"].unique()))
        raise UsageError(f"the rows are of several data sets ({names}); give each a folder of its own (--out)")
    keys = [*BY, "image_id"]
    if rows.duplicated([*keys, "seed"]).any():
        first = rows[rows.duplicated([*keys, "seed"])].iloc[0]
        raise UsageError(
            f"the rows hold {first['attack']!r} on {first['model']!r} with several parameters or defences; give each a "
            "folder of its own (--out)"
        )
    if not rows.duplicated(keys).any():
        return rows
    numbers = dict.fromkeys([*METRICS, "seconds", "condition"], "mean")
    return rows.groupby(keys, sort=False).agg(numbers | {"diagnosis": "first"}).reset_index()
