"""With and without position embeddings: paired differences of the same images, weights and attacks.

What is compared with what, and under which threat model: `options.ClaimOptions`.
"""

from __future__ import annotations

from math import nan

import pandas as pd
from rich.console import Console

from attacks import Capability, UsageError
from experiments.leakage.options import ClaimOptions
from experiments.rendering import csv, markdown_table
from experiments.scaffold import PAPER
from fedmjp.metrics import bootstrap_mean
from fedmjp.records.rows import load_rows

PAIRED = ["block", "attack", "setting", "seed", "image_id"]
# Sign of a difference (without minus with positions) that means: easier to attack without.
EASIER = {"psnr": 1, "ssim": 1, "lpips": -1}


def differences(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Mean paired difference (without minus with positions) by block, attack, setting and metric.

    Raises:
        UsageError: the rows do not hold both models.
    """
    plain = rows[(rows["model"] == model) & (rows["precision"] == "float32")]
    bare = rows[(rows["model"] == f"{model}_nope") & (rows["precision"] == "float32")]
    granted = bare[_granted(bare)]
    pairs = plain.merge(granted, on=PAIRED, suffixes=("_with", "_without"))
    if pairs.empty:
        raise UsageError(f"no rows of both {model} and {model}_nope; run benchmarks/april_attack.py with both")
    paper = pd.read_csv(PAPER / "mjp_table5.csv").set_index(["setting", "model"])
    lines = []
    for (block, attack, setting), group in pairs.groupby(["block", "attack", "setting"], sort=True):
        for metric, sign in EASIER.items():
            found = bootstrap_mean((group[f"{metric}_without"] - group[f"{metric}_with"]).to_numpy())
            if not found.count:
                continue
            theirs = paper[metric].get((setting, f"{model}_nope"), nan) - paper[metric].get((setting, model), nan)
            ends = sorted((sign * found.low, sign * found.high))
            lines.append(
                {
                    "block": block,
                    "attack": attack,
                    "setting": setting,
                    "metric": metric,
                    "with_positions_mean": group[f"{metric}_with"].mean(),
                    "without_mean": group[f"{metric}_without"].mean(),
                    "difference_mean": found.mean,
                    "difference_low": found.low,
                    "difference_high": found.high,
                    "count": found.count,
                    "verdict": "easier" if ends[0] > 0 else "harder" if ends[1] < 0 else "no different",
                    "paper_difference": theirs if attack == block == "april" else nan,
                }
            )
    return pd.DataFrame(lines)


def as_sent(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows of the model without positions under the honest threat model."""
    bare = rows[rows["model"] == f"{model}_nope"]
    return bare[~_granted(bare)]


def _granted(rows: pd.DataFrame) -> pd.Series:
    return rows["threat_model"].map(lambda grants: Capability.TOKEN_GRADIENT.value in grants).astype(bool)


def markdown(table: pd.DataFrame) -> str:
    """The lines of PSNR."""
    lines = []
    for _, row in table[table["metric"] == "psnr"].iterrows():
        paper = "–" if pd.isna(row.paper_difference) else f"{row.paper_difference:+.1f}"
        change = f"{row.difference_mean:+.2f} [{row.difference_low:+.2f}, {row.difference_high:+.2f}]"
        cells = [row.block, f"`{row.attack}`", f"({row.setting})", f"{row.with_positions_mean:.1f}"]
        cells.append(f"{row.without_mean:.1f}")
        lines.append([*cells, change, row.verdict, f"{row['count']:.0f}", paper])
    heads = ["block", "attack", "setting", "with positions (dB)", "without, token gradient granted (dB)", "difference"]
    return markdown_table([*heads, "without is", "images", "paper's difference"], lines)


def claim_files(rows: pd.DataFrame, model: str) -> dict[str, str]:
    """position_claim.csv and position_claim.md.

    Raises:
        UsageError: the rows do not hold both models.
    """
    table = differences(rows, model)
    return {"position_claim.csv": csv(table, 5), "position_claim.md": markdown(table) + "\n"}


def run(options: ClaimOptions, console: Console) -> None:
    """Compare, print, write."""
    rows = load_rows(options.rows)
    table, refused = differences(rows, options.model), as_sent(rows, options.model)
    answered = refused[refused["psnr"].notna()]
    console.print(table.to_string(index=False, float_format=lambda v: f"{v:.3f}"), highlight=False)
    console.print(
        f"As sent, {options.model}_nope gave an image in {len(answered)} of {len(refused)} attacks"
        + (f": {refused['diagnosis'].mode()[0]}" if len(refused) else ""),
        highlight=False,
    )
    for name, text in claim_files(rows, options.model).items():
        (options.rows.parent / name).write_text(text, encoding="utf-8")
