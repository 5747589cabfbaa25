"""What is rendered from the rows of MST's pre-trainings: its tables beside the paper's figures, and the pretext task.

Two uncertainties are given, as in `experiments.trainings.seeds`: intervals are Student's over seeds; `one_seed_margin`
is half the bootstrap interval over the test images of one training, and `difference_margin` that of a difference of two
trainings, taken as independent although both answer the same images, so that it is rather too wide. A sign is judged
from three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.pretraining.mst_options import DEFAULT, KS
from experiments.rendering import Rendering, csv, markdown_table, read_rows
from experiments.scaffold import PAPER
from experiments.trainings.seeds import (
    difference_cell,
    mean_cell,
    mean_over_seeds,
    paired_difference,
    seed_count,
)
from experiments.trainings.verdicts import signs_in_words, with_verdicts
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
LINEAR, LINEAR_BLOCKS = "linear", "linear_blocks"
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
    "longer": "three times the epochs",
    "random_0.25": "random, 25 %",
    "random_0.5": "random, 50 %",
    "no_norm": "least attended, decoder without batch norm",
    "none_no_norm": "nothing, decoder without batch norm",
    "random_0.01_no_norm": "random, 1 %, decoder without batch norm",
}
STRATEGIES = (DEFAULT, "none", "random", "attended", "mlm", "mlm_dino", "bert")
LAMBDAS = ("lambda_0.2", "lambda_0.4", DEFAULT, "lambda_0.8")
MASKS = (DEFAULT, "none", "random", "random_0.25", "random_0.5", "no_norm", "none_no_norm", "random_0.01_no_norm")
LONGER = "longer"
PROBES = {
    LINEAR: "linear probe of the last class token",
    LINEAR_BLOCKS: "linear probe of the last blocks' class tokens (DINO's)",
    "knn_10": "10-NN",
}
CASE = ("line", "network", "measure")
COLUMNS = (
    *("precision", *CASE, "accuracy_mean", "accuracy_low", "accuracy_high", "seeds", "one_seed_margin"),
    *("difference_mean", "difference_low", "difference_high", "difference_margin"),
    *("paper_accuracy", "paper_difference", "difference_p", "verdict"),
)


def accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a pre-training, network and measure, of the student also the difference from the default line, and of
    the default line that of DINO's linear probe from the common one.

    Returns:
        columns precision, line, network, measure, accuracy_mean, _low, _high (per cent, over seeds), seeds,
        one_seed_margin, difference_mean, _low, _high (paired by seed, of trainings in the same type of activations),
        difference_margin, paper_accuracy, paper_difference, difference_p, verdict.
    """
    by_case = {case: group.set_index("seed") for case, group in rows.groupby(["precision", *CASE], sort=False)}
    paper = _paper()
    lines = []
    for (precision, name, network, measure), group in by_case.items():
        line = {"precision": precision, "line": name, "network": network, "measure": measure}
        line |= mean_over_seeds("accuracy", group["accuracy"])
        line["one_seed_margin"] = _margin(group)
        if network == "student":
            against = _compared_with(name, measure)
            other = by_case.get((precision, against[0], network, against[1]))
            figure, theirs = paper.get((name, measure), math.nan), paper.get(against, math.nan)
            line["paper_accuracy"] = figure
            if other is not None and against != (name, measure):
                line |= paired_difference(group["accuracy"], other["accuracy"], figure - theirs)
                line["difference_margin"] = math.hypot(_margin(group), _margin(other))
        lines.append(line)
    return with_verdicts(pd.DataFrame(lines)).reindex(columns=COLUMNS)


def _compared_with(name: str, measure: str) -> tuple[str, str]:
    """The line and measure that a difference is taken from; the same where there is none."""
    return (DEFAULT, LINEAR if (name, measure) == (DEFAULT, LINEAR_BLOCKS) else measure)


def _margin(group: pd.DataFrame) -> float:
    """Half the interval over the test images of one training, averaged over seeds."""
    return (group["accuracy_high"] - group["accuracy_low"]).mean() / 2


def files(folder: Path) -> dict[str, str]:
    """table.csv, and a table in Markdown for each block."""
    rows = read_rows(folder, ROWS)
    table = accuracies(rows)
    return {
        "table.csv": csv(table, 5),
        "table1.md": neighbours_text(trained_alike(table, [DEFAULT], "knn_10"), rows) + "\n",
        "table2.md": probes_text(trained_alike(table, [DEFAULT], LINEAR_BLOCKS)) + "\n",
        "table3.md": longer_text(trained_alike(table, [LONGER]), rows) + "\n",
        "table4.md": lines_text(trained_alike(table, STRATEGIES), STRATEGIES, "what is hidden and restored") + "\n",
        "table_masks.md": lines_text(trained_alike(table, MASKS), MASKS, "hidden patches") + "\n",
        "table_lambda.md": lines_text(trained_alike(table, LAMBDAS), LAMBDAS, "lambda_2", {DEFAULT: "0.6"}) + "\n",
        "table_pretext.md": pretext_text(rows) + "\n",
    }


def trained_alike(table: pd.DataFrame, wanted: Sequence[str], measure: str = LINEAR) -> pd.DataFrame:
    """The lines of `accuracies` of one type of activations, by line, network and measure: of the type in which most of
    the wanted ones were trained, so that no difference mixes two of them.
    """
    counted = table["line"].isin(wanted) & (table["network"] == "student") & (table["measure"] == measure)
    found = table.loc[counted if counted.any() else slice(None), "precision"].mode(dropna=False)
    return table[table["precision"] == found.iloc[0]].set_index(list(CASE))


def _type_in_words(own: pd.DataFrame) -> str:
    return f"Trained in {own['precision'].iloc[0]}."


def neighbours_text(own: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Table 1: the default line by k."""
    paper = pd.read_csv(PAPER / "mst_table1.csv").set_index("measure")["accuracy"]
    lines = []
    for k in KS:
        cells = [_cell(own, (DEFAULT, network, f"knn_{k}")) for network in ("student", "teacher", "start")]
        lines.append([str(k), *cells, f"{paper[f'knn_{k}']:.1f}"])
    heads = ["k", "student (%)", "teacher (%)", "before training (%)", "paper (%)"]
    return f"{markdown_table(heads, lines)}\n\n{_type_in_words(own)} {limits(rows)}"


def probes_text(own: pd.DataFrame) -> str:
    """Table 2: both linear probes of the default line."""
    lines = []
    for measure in (LINEAR, LINEAR_BLOCKS):
        if (DEFAULT, "student", measure) not in own.index:
            continue
        row = own.loc[(DEFAULT, "student", measure)]
        cells = [_cell(own, (DEFAULT, network, measure)) for network in ("student", "teacher", "start")]
        lines.append([PROBES[measure], *cells, f"{row['paper_accuracy']:.1f}", difference_cell(row)])
    heads = [
        "probe",
        "student (%)",
        "teacher (%)",
        "before training (%)",
        "paper (%)",
        "student, from the common probe",
    ]
    return f"{markdown_table(heads, lines)}\n\n{_type_in_words(own)}"


def longer_text(own: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Table 3: the default line and three times its epochs."""
    lines = []
    for name in (DEFAULT, LONGER):
        alike = (rows["line"] == name) & (rows["precision"] == own["precision"].iloc[0])
        seen = rows.loc[alike, "images_seen"].unique()
        for measure in PROBES:
            if (name, "student", measure) not in own.index:
                continue
            row = own.loc[(name, "student", measure)]
            change = difference_cell(row) if name == LONGER else ""
            figure = f"{row['paper_accuracy']:.1f}"
            lines.append([f"{seen[0]:,}", PROBES[measure], mean_cell(row, "accuracy"), figure, change])
    heads = ["images seen", "measure", "student (%)", "paper, 100 and 300 epochs (%)", "from shorter"]
    return f"{markdown_table(heads, lines)}\n\n{_type_in_words(own)}"


def lines_text(own: pd.DataFrame, wanted: Sequence[str], title: str, words: Mapping[str, str] = WORDS) -> str:
    """A table of lines: linear probe and k-NN of the student, the paper's linear probe, and the difference from the
    default line with what it says of the paper's.

    Args:
        own: `accuracies` by line, network and measure.
    """
    ran = [name for name in wanted if (name, "student", "linear") in own.index]
    measures = ("linear", "knn_20")
    # All lines of a seed start from the same encoder.
    lines = [["", "before training", *(_cell(own, (name, "start", m)) for m in measures), "", ""] for name in ran[:1]]
    for name in ran:
        row = own.loc[(name, "student", "linear")]
        figure = "" if pd.isna(row["paper_accuracy"]) else f"{row['paper_accuracy']:.1f}"
        cells = [_cell(own, (name, "student", measure)) for measure in measures]
        lines.append([f"`{name}`", {**WORDS, **words}[name], *cells, figure, difference_cell(row)])
    heads = ["line", title, "linear probe (%)", "20-NN (%)", "paper, linear (%)", "linear, from default"]
    missing = [f"`{name}`" for name in wanted if name not in ran]
    words = " ".join(part for part in (_type_in_words(own), signs_in_words(own)) if part)
    text = f"{markdown_table(heads, lines)}\n\n{words}"
    return f"{text}\n\nNot run: {', '.join(missing)}." if missing else text


def pretext_text(rows: pd.DataFrame) -> str:
    """Whether each line learned its pretext task."""
    lines = []
    for (name, precision), group in rows.drop_duplicates("training").groupby(["line", "precision"], sort=False):
        mean = group[[*PRETEXT, "outputs"]].astype(float).mean()
        top = math.log(mean["outputs"])
        cells = [_number(mean[key]) for key in PRETEXT[:3]]
        pairs = [
            " / ".join(_number(mean[key]) for key in pair) if mean[list(pair)].notna().all() else ""
            for pair in zip(PRETEXT[3:5], PRETEXT[5:], strict=True)
        ]
        lines.append([f"`{name}`", precision, *cells, f"{top:.2f}" if cells[0] else "", *pairs])
    heads = ["line", "type", "cross-entropy", "of a student that ignores the image", "teacher's entropy", "uniform"]
    return markdown_table([*heads, "L1 restored / mean colour", "the same, hidden patches"], lines)


def limits(rows: pd.DataFrame) -> str:
    """What these trainings were, and what they cannot show."""
    seen = sorted(set(rows["images_seen"]))
    tests, data = rows["images"].iloc[0], "; ".join(sorted(set(rows["provenance"])))
    return (
        f"{rows['model'].iloc[0]} on {rows['dataset'].iloc[0]} ({data}); every training saw "
        f"{' or '.join(f'{n:,}' for n in seen)} images, the paper's DeiT-S {PAPERS_IMAGES:,} and more. "
        f"{seed_count(rows.groupby('line')['seed'].nunique())}; brackets: Student's 95 % interval over seeds; ±: of "
        f"one seed, over {tests:,} test images alone. A sign is judged from three seeds."
    )


def _paper() -> Mapping[tuple[str, str], float]:
    """The paper's accuracies by line and measure; of Table 1 `neighbours_text` shows them, as of a longer training."""
    tables = (pd.read_csv(PAPER / f"{name}.csv") for name in ("mst_table4", "mst_lambda", "mst_masks", "mst_table3"))
    found = pd.concat([table if "measure" in table else table.assign(measure=LINEAR) for table in tables])
    return found.set_index(["line", "measure"])["accuracy"].to_dict()


def _cell(own: pd.DataFrame, key: tuple[str, str, str]) -> str:
    return mean_cell(own.loc[key], "accuracy") if key in own.index else ""


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _block(name: str):
    return lambda folder: (folder / f"{name}.md").read_text(encoding="utf-8").strip()


MST = Rendering(
    "mst",
    files,
    {
        "mst_neighbours": _block("table1"),
        "mst_probes": _block("table2"),
        "mst_longer": _block("table3"),
        "mst_masks": _block("table_masks"),
        "mst_strategies": _block("table4"),
        "mst_lambda": _block("table_lambda"),
        "mst_pretext": _block("table_pretext"),
    },
)
