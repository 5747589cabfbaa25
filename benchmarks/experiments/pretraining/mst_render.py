"""What is rendered from the rows of MST's pre-trainings: its tables beside the paper's figures, and the pretext task.

Intervals are bootstrap intervals over the test images of one training, averaged over seeds where there are several:
what other test images would give of the same weights. What another seed would give, one seed cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.pretraining.mst_options import DEFAULT, KS
from experiments.rendering import MEAN, Rendering, csv, interval, markdown_table, read_rows
from experiments.scaffold import PAPER
from experiments.trainings.seeds import AGREES, CONTRADICTS, UNDECIDED
from fedmjp.records.rows import Schema

PRETEXT = (
    *("distillation", "collapse", "teacher_entropy"),
    *("restoration", "restoration_hidden", "mean_colour", "mean_colour_hidden"),
)
ROWS = Schema(
    keys=(
        *("training", "line", "model", "objective", "dataset", "train_limit", "test_limit", "recipe", "precision"),
        *("seed", "network", "measure", "accuracy", "accuracy_low", "accuracy_high", *PRETEXT, "outputs"),
        *("train_loss", "steps", "images_seen", "train_seconds", "images_per_second", "parameters", "images"),
        *("weights", "provenance", "commit", "version", "torch_version", "device"),
    ),
    identity=("training", "network", "measure"),
)
PAPERS_IMAGES = 100 * 1_281_167  # 100 epochs of ImageNet-1k; Table 1 saw three times as many
WORDS = {
    DEFAULT: "least attended, [mask] token, whole image",
    "none": "nothing hidden",
    "random": "random, as many hidden",
    "attended": "most attended",
    "mlm": "random 15 %, BERT's replacement, hidden patches, no DINO loss",
    "mlm_dino": "the same with DINO loss",
    "bert": "least attended, BERT's replacement, whole image",
    "lambda_0.2": "0.2",
    "lambda_0.4": "0.4",
    "lambda_0.8": "0.8",
}
STRATEGIES = (DEFAULT, "none", "random", "attended", "mlm", "mlm_dino", "bert")
LAMBDAS = ("lambda_0.2", "lambda_0.4", DEFAULT, "lambda_0.8")


def accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a pre-training, network and measure: accuracy and its interval (per cent), means over seeds."""
    numbers = ["accuracy", "accuracy_low", "accuracy_high"]
    grouped = rows.groupby(["line", "network", "measure"], sort=False)
    table = grouped[numbers].mean().assign(seeds=grouped["seed"].nunique()).reset_index()
    return table.rename(columns={"accuracy": "accuracy_mean"})


def files(folder: Path) -> dict[str, str]:
    """table.csv, and a table in Markdown for each block."""
    rows = read_rows(folder, ROWS)
    table = accuracies(rows)
    own = table.set_index(["line", "network", "measure"])
    return {
        "table.csv": csv(table, 5),
        "table1.md": neighbours_text(own, rows) + "\n",
        "table4.md": lines_text(own, rows, STRATEGIES, "what is hidden and restored", _paper("mst_table4")) + "\n",
        "table_lambda.md": lines_text(own, rows, LAMBDAS, "lambda_2", _paper("mst_lambda"), {DEFAULT: "0.6"}) + "\n",
        "table_pretext.md": pretext_text(rows) + "\n",
    }


def neighbours_text(own: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Table 1: the default line by k."""
    paper = pd.read_csv(PAPER / "mst_table1.csv").set_index("measure")["accuracy"]
    lines = []
    for k in KS:
        cells = [_cell(own, (DEFAULT, network, f"knn_{k}")) for network in ("student", "teacher", "start")]
        lines.append([str(k), *cells, f"{paper[f'knn_{k}']:.1f}"])
    heads = ["k", "student (%)", "teacher (%)", "before training (%)", "paper (%)"]
    return f"{markdown_table(heads, lines)}\n\n{limits(rows)}"


def lines_text(
    own: pd.DataFrame,
    rows: pd.DataFrame,
    wanted: Sequence[str],
    title: str,
    paper: Mapping[str, float],
    words: Mapping[str, str] = WORDS,
) -> str:
    """A table of lines: linear probe and k-NN of the student, the paper's linear probe, and whether the difference from
    the default has the paper's sign.
    """
    ran = [name for name in wanted if (name, "student", "linear") in own.index]
    measures = ("linear", "knn_20")
    # All lines of a seed start from the same encoder.
    lines = [["", "before training", *(_cell(own, (name, "start", m)) for m in measures), "", ""] for name in ran[:1]]
    for name in ran:
        figure = f"{paper[name]:.1f}" if name in paper else ""
        cells = [_cell(own, (name, "student", measure)) for measure in measures]
        lines.append([f"`{name}`", {**WORDS, **words}[name], *cells, figure, _from_default(own, name, paper)])
    heads = ["line", title, "linear probe (%)", "20-NN (%)", "paper, linear (%)", "linear, from default (paper)"]
    missing = [f"`{name}`" for name in wanted if name not in ran]
    text = markdown_table(heads, lines)
    return f"{text}\n\nNot run: {', '.join(missing)}." if missing else text


def pretext_text(rows: pd.DataFrame) -> str:
    """Whether each line learned its pretext task."""
    lines = []
    for name, group in rows.drop_duplicates("training").groupby("line", sort=False):
        mean = group[[*PRETEXT, "outputs"]].astype(float).mean()
        top = math.log(mean["outputs"])
        cells = [_number(mean[key]) for key in PRETEXT[:3]]
        pairs = [
            " / ".join(_number(mean[key]) for key in pair) if mean[list(pair)].notna().all() else ""
            for pair in zip(PRETEXT[3:5], PRETEXT[5:], strict=True)
        ]
        lines.append([f"`{name}`", *cells, f"{top:.2f}" if cells[0] else "", *pairs])
    heads = ["line", "cross-entropy", "of a student that ignores the image", "teacher's entropy", "uniform"]
    return markdown_table([*heads, "L1 restored / mean colour", "the same, hidden patches"], lines)


def limits(rows: pd.DataFrame) -> str:
    """What these trainings were, and what they cannot show."""
    seen, seeds = sorted(set(rows["images_seen"])), rows["seed"].nunique()
    tests, data = rows["images"].iloc[0], "; ".join(sorted(set(rows["provenance"])))
    return (
        f"{rows['model'].iloc[0]} on {rows['dataset'].iloc[0]} ({data}); every training saw "
        f"{' or '.join(f'{n:,}' for n in seen)} images, the paper's DeiT-S {PAPERS_IMAGES:,} and more. "
        f"{seeds} seed{'s' if seeds > 1 else ''}; brackets are 95 % intervals over {tests:,} test images."
    )


def _paper(name: str) -> Mapping[str, float]:
    return pd.read_csv(PAPER / f"{name}.csv").set_index("line")["accuracy"].to_dict()


def _from_default(own: pd.DataFrame, name: str, paper: Mapping[str, float]) -> str:
    """The linear probe's difference from the default's, with its interval over test images, and the paper's sign.

    The interval treats the two accuracies as independent; both are of the same images, so that it is rather too wide.
    """
    if name == DEFAULT or (DEFAULT, "student", "linear") not in own.index:
        return ""
    line, reference = (own.loc[(one, "student", "linear")] for one in (name, DEFAULT))
    change = line["accuracy_mean"] - reference["accuracy_mean"]
    margin = math.hypot(*((one["accuracy_high"] - one["accuracy_low"]) / 2 for one in (line, reference)))
    cell = f"{change:+z.1f} [{change - margin:+.1f}, {change + margin:+.1f}]"
    if name not in paper:
        return cell
    theirs = round(paper[name] - paper[DEFAULT], 6)
    found = UNDECIDED if abs(change) <= margin else AGREES if change * theirs > 0 else CONTRADICTS
    return f"{cell} ({theirs:+.1f}: {found})"


def _cell(own: pd.DataFrame, key: tuple[str, str, str]) -> str:
    return interval(own.loc[key], "accuracy", 1, MEAN) if key in own.index else ""


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _block(name: str):
    return lambda folder: (folder / f"{name}.md").read_text(encoding="utf-8").strip()


MST = Rendering(
    "mst",
    files,
    {
        "mst_neighbours": _block("table1"),
        "mst_strategies": _block("table4"),
        "mst_lambda": _block("table_lambda"),
        "mst_pretext": _block("table_pretext"),
    },
)
