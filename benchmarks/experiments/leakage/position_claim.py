"""Are models without position embeddings easier to attack?  python benchmarks/position_claim.py

The MJP paper says so (section 5.2, from Table 5). Here the same photographs, weights and attacks meet a model with and
without its position embedding, and the difference is taken image by image, from the rows that
`python benchmarks/april_attack.py` wrote. Positive differences of PSNR and SSIM and negative ones of LPIPS mean: easier
to attack without. As sent, a model without position embeddings holds no gradient per token and no closed form runs on
it; the comparison is with the server that is granted that gradient nevertheless (threat model `token_gradient`).

Prints the table, and writes position_claim.csv and .md beside the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path

import pandas as pd
from rich.console import Console

from attacks import Capability, UsageError
from fedmjp.cli import guarded, parse, terminal
from fedmjp.metrics import bootstrap_mean
from fedmjp.report import load_rows

HERE = Path(__file__).resolve().parents[2]
RESULTS, PAPER = HERE.parent / "results" / "april_attack", HERE / "paper" / "mjp_table5.csv"
PAIRED = ["block", "attack", "setting", "seed", "image_id"]
# Sign of a difference (without minus with positions) that means: easier to attack without.
EASIER = {"psnr": 1, "ssim": 1, "lpips": -1}


@dataclass(frozen=True)
class Options:
    """Whether removing position embeddings makes a model easier to attack."""

    rows: Path = RESULTS / "rows.jsonl.gz"
    """Rows of april_attack.py."""
    model: str = "deit_s"
    """Model with position embeddings; its _nope variant is held against it."""


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
    paper = pd.read_csv(PAPER).set_index(["setting", "model"])
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
                    "with_positions": group[f"{metric}_with"].mean(),
                    "without": group[f"{metric}_without"].mean(),
                    "difference": found.mean,
                    "low": found.low,
                    "high": found.high,
                    "images": found.count,
                    "without_is": "easier" if ends[0] > 0 else "harder" if ends[1] < 0 else "no different",
                    "paper": theirs if attack == block == "april" else nan,
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
    """The PSNR lines for a README."""
    lines = [
        "| block | attack | setting | with positions (dB) | without, token gradient granted (dB) | difference | "
        "without is | images | paper's difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for _, row in table[table["metric"] == "psnr"].iterrows():
        paper = "–" if pd.isna(row.paper) else f"{row.paper:+.1f}"
        interval = f"{row.difference:+.2f} [{row.low:+.2f}, {row.high:+.2f}]"
        cells = [row.block, f"`{row.attack}`", f"({row.setting})", f"{row.with_positions:.1f}", f"{row.without:.1f}"]
        lines.append("| " + " | ".join([*cells, interval, row.without_is, str(row.images), paper]) + " |")
    return "\n".join(lines)


def run(options: Options, console: Console) -> None:
    """Compare, print, write."""
    rows = load_rows(options.rows)
    table, silent = differences(rows, options.model), as_sent(rows, options.model)
    answered = silent[silent["psnr"].notna()]
    console.print(table.to_string(index=False, float_format=lambda v: f"{v:.3f}"), highlight=False)
    console.print(
        f"As sent, {options.model}_nope gave an image in {len(answered)} of {len(silent)} attacks"
        + (f": {silent['diagnosis'].mode()[0]}" if len(silent) else ""),
        highlight=False,
    )
    table.to_csv(options.rows.parent / "position_claim.csv", index=False, float_format="%.5g")
    (options.rows.parent / "position_claim.md").write_text(markdown(table) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parse(Options, "python benchmarks/position_claim.py", __doc__, arguments)
    return guarded(lambda: run(options, terminal()), lambda: "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
