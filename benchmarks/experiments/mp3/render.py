"""What is rendered from the rows of MP3's tables in kind.

Two uncertainties are given, as in `experiments.trainings.seeds`: intervals of means and differences are Student's over
seeds; `one_seed_margin` is half of Wilson's interval over the test images of one training, and `difference_margin` that
of a difference between two such trainings, taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from experiments.mp3.claims import claim_table
from experiments.mp3.curves import curves
from experiments.mp3.options import BRIEF, DEFAULT, LINES, SCRATCH, TEST_ETAS, VARIANTS
from experiments.mp3.rows import ROWS, TRAINED
from experiments.mp3.steps import FILE
from experiments.rendering import Rendering, csv, difference, interval, markdown_table, read_rows
from experiments.scaffold import PAPER, RESULTS
from experiments.trainings.seeds import change_cell, mean_cell, mean_over_seeds, paired_difference
from experiments.trainings.verdicts import signs_in_words, with_verdicts

PAPERS_IMAGES = 2000 * 50_000  # 2,000 epochs of CIFAR-100
TABLE_3 = tuple(f"{start}_{positions}" for positions in VARIANTS for start in ("scratch", "mp3"))
SETTINGS = {
    "Figure 4, epochs of pre-training": (BRIEF, DEFAULT, "pretrained_longer"),
    "Figure 5, epochs with labels": (
        *("scratch_shorter", "mp3_shorter", SCRATCH, DEFAULT, "scratch_longer", "mp3_longer"),
    ),
    "Figure 6, masking ratio": ("eta_0", BRIEF, "eta_0.75", "eta_0.9"),
    "Figure 7, patch size": (*("scratch_patch_4", "mp3_patch_4", SCRATCH, BRIEF, "scratch_patch_16", "mp3_patch_16"),),
    "Table 7, transfer to Tiny-ImageNet": ("scratch_transfer", "mp3_transfer"),
}


def paper_accuracies() -> pd.DataFrame:
    """The paper's Table 3: top-1 accuracy (%) by line (index) and data set (columns)."""
    return pd.read_csv(PAPER / "mp3_table3.csv").pivot(index="line", columns="dataset", values="accuracy")


def line_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a training with labels: accuracy, difference from `against` paired by seed, the paper's and a verdict.

    Returns:
        columns line, model, eta, pretraining_epochs, epochs, images_seen (without labels), seeds, accuracy_mean, _low,
        _high (over seeds), one_seed_margin, place_accuracy (of the pre-training, at its own ratio), against,
        difference_mean, _low, _high, difference_margin, paper_accuracy, paper_difference, difference_p, verdict.
    """
    paper = paper_accuracies()["cifar100"]
    found = rows[(rows["measure"] == "accuracy") & (rows["network"] == TRAINED)]
    labelled = found[found["line"] != ""]
    encoders = found[found["line"] == ""].set_index("training")
    by_seed = labelled.pivot(index="line", columns="seed", values="value")
    lines = []
    for name in (one for one in LINES if one in by_seed.index):
        group, own, against = labelled[labelled["line"] == name], by_seed.loc[name], LINES[name].against
        first = group.iloc[0]
        starts = encoders.reindex([one for one in group["encoder"] if one])
        theirs = paper.get(name, math.nan)
        line = {"line": name, "model": first["model"], "eta": first["eta"]}
        line |= {"pretraining_epochs": first["pretraining_epochs"], "epochs": first["recipe"]["epochs"]}
        line |= {"images_seen": starts["images_seen"].max() if len(starts) else 0} | mean_over_seeds("accuracy", own)
        line |= {"one_seed_margin": _margin(group)}
        line |= {"place_accuracy": starts["value"].mean() if len(starts) else math.nan, "against": against}
        if against in by_seed.index:
            margins = [_margin(group), _margin(labelled[labelled["line"] == against])]
            line |= paired_difference(own, by_seed.loc[against], theirs - paper.get(against, math.nan))
            line["difference_margin"] = math.hypot(*margins)
        lines.append(line | {"paper_accuracy": theirs})
    columns = ["difference_mean", "difference_low", "difference_high", "difference_margin"]
    columns += ["paper_accuracy", "paper_difference", "difference_p", "verdict"]
    table = with_verdicts(pd.DataFrame(lines))
    return table.reindex(columns=[*(name for name in table if name not in columns), *columns])


def _margin(group: pd.DataFrame) -> float:
    """Half of Wilson's interval over the test images of one training, averaged over seeds."""
    return (group["value_high"] - group["value_low"]).mean() / 2


def place_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Places found by each pre-training (its line in the order of `LINES`) at each masking ratio, over seeds."""
    lines = []
    for name, start in _encoders(rows):
        own = rows[(rows["measure"] == "places") & rows["training"].isin(start)]
        for eta, group in own.groupby("eta_test"):
            first = group.iloc[0]
            line = {"line": name, "model": first["model"], "eta": first["eta"], "eta_test": eta}
            line |= {"pretraining_epochs": first["pretraining_epochs"], "patches": first["patches"]}
            lines.append(line | mean_over_seeds("places", group["value"]))
    return pd.DataFrame(lines)


def structure_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Neighbours, correlations and distances of each encoder, before and after its pre-training, and of each line."""
    parts = [("encoder", name, start) for name, start in _encoders(rows)]
    parts += [("labels", n, rows[rows["line"] == n]["training"].unique()) for n in LINES if n in set(rows["line"])]
    lines, keys = [], ["network", "measure", "layer", "head"]
    for after, name, trainings in parts:
        own = rows[rows["training"].isin(trainings) & ~rows["measure"].isin(["accuracy", "places"])]
        for key, group in own.groupby(keys, sort=False, dropna=False):
            line = {"after": after, "line": name} | dict(zip(keys, key, strict=True))
            lines.append(line | mean_over_seeds("value", group["value"]))
    return pd.DataFrame(lines)


def _encoders(rows: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Name of the first line that starts from each kind of pre-training, and the trainings of it, one a seed."""
    found: dict[str, list[str]] = {}
    for name in (one for one in LINES if one in set(rows["line"])):
        starts = [one for one in rows[rows["line"] == name]["encoder"].unique() if one]
        if starts and not any(set(starts) & set(known) for known in found.values()):
            found[name] = starts
    return list(found.items())


def files(folder: Path) -> dict[str, str]:
    """table.csv, places.csv, structure.csv and claims.csv."""
    rows = read_rows(folder, ROWS)
    made = {"table": line_table, "places": place_table, "structure": structure_table, "claims": claim_table}
    return {f"{name}.csv": csv(make(rows), 5) for name, make in made.items()}


def table3_block(folder: Path) -> str:
    """Table 3: fine-tuning after MP3 against training from scratch, by kind of positions."""
    table, paper = pd.read_csv(folder / "table.csv").set_index("line"), paper_accuracies()
    lines = []
    for name in (one for one in TABLE_3 if one in table.index):
        row, pretrained, positions = table.loc[name], LINES[name].pretrained, LINES[name].positions
        cells = ["MP3" if pretrained else "from scratch", positions, mean_cell(row, "accuracy"), change_cell(row)]
        papers = "" if pd.isna(row["paper_difference"]) else f"{row['paper_difference']:+g}"
        lines.append([*cells, " / ".join(f"{value:g}" for value in paper.loc[name]), papers, _words(row["verdict"])])
    heads = ["start", "positions", "top-1 (%)", "MP3 - scratch", "paper (%)", "paper's difference", "sign"]
    return f"{markdown_table(heads, lines)}\n\n{limits(folder, table)} {signs_in_words(table)}".rstrip()


def settings_block(folder: Path) -> str:
    """Figures 4 to 7 and Table 7: other epochs, masking ratios, patch sizes and labels."""
    table = pd.read_csv(folder / "table.csv").set_index("line")
    lines = []
    for title, names in SETTINGS.items():
        for name in (one for one in names if one in table.index):
            row = table.loc[name]
            start = "from scratch" if not LINES[name].pretrained else f"MP3, η = {row['eta']:g}"
            epochs = [f"{row['pretraining_epochs']:g}" if LINES[name].pretrained else "", f"{row['epochs']:g}"]
            places = "" if pd.isna(row["place_accuracy"]) else f"{row['place_accuracy']:.1f}"
            change = change_cell(row)
            change += f" from `{row['against']}`" if change else ""
            lines.append([title, f"`{row['model']}`", start, *epochs, places, mean_cell(row, "accuracy"), change])
    heads = ["what varies", "model", "start", "epochs of MP3", "epochs with labels", "places (%)", "top-1 (%)"]
    return markdown_table([*heads, "difference"], lines) + _missing(table.index)


def places_block(folder: Path) -> str:
    """Figure 3: places found, by the masking ratio of training and test."""
    table = pd.read_csv(folder / "places.csv")
    lines = []
    for _, group in table.groupby("line", sort=False):
        own, first = group.set_index("eta_test"), group.iloc[0]
        cells = [interval(own.loc[eta], "places", 1) for eta in TEST_ETAS]
        chance = f"{100 / first['patches']:.1f}"
        about = [f"{first['eta']:g}", f"`{first['model']}`", f"{first['pretraining_epochs']}", f"{first['seeds']}"]
        lines.append([*about, *cells, chance])
    heads = ["η of training", "model", "epochs", "seeds", *(f"test η = {eta:g}" for eta in TEST_ETAS), "chance"]
    return markdown_table(heads, lines)


def claims_block(folder: Path) -> str:
    """What the paper says, and what our trainings say of it."""
    table, lines = pd.read_csv(folder / "claims.csv"), []
    for _, row in table.iterrows():
        digits = 1 if row["unit"] == "points" else 3
        papers = "+" if row["expected"] > 0 else "-"
        papers = papers if pd.isna(row["paper_difference"]) else f"{row['paper_difference']:+g}"
        cells = [row["place"], row["claim"], difference(row, digits), row["unit"], papers, f"{row['seeds']}"]
        lines.append([*cells, row["verdict"]])
    heads = ["where", "the paper says", "our difference", "unit", "paper", "seeds", "verdict"]
    words = signs_in_words(table.assign(paper_difference=table["expected"]))
    return f"{markdown_table(heads, lines)}\n\n{words}".rstrip()


def steps_block(folder: Path) -> str:
    """Table 2: seconds of a step."""
    lines = []
    for _, row in pd.read_csv(folder / FILE).iterrows():
        ratio = interval(row, "ratio", 2, ("_median", "_q25", "_q75"))
        papers = [f"{row['paper_seconds']:g}", f"{row['paper_ratio']:.2f}"]
        lines.append([f"`{row['objective']}`", f"{row['seconds']:.3f}", ratio, *papers])
    heads = ["step", "seconds", "to the plain step [quartiles]", "paper, seconds", "paper, to its plain step"]
    return markdown_table(heads, lines)


def limits(folder: Path, table: pd.DataFrame) -> str:
    """What these trainings were."""
    rows = read_rows(folder, ROWS)
    limit, tests = rows["train_limit"].iloc[0], rows["images"].iloc[0]
    images = "all images" if pd.isna(limit) else f"{limit:,.0f} images"
    own = table.loc[[name for name in TABLE_3 if name in table.index]]
    seen = int(own["images_seen"].max())
    data = "; ".join(sorted(set(rows[rows["line"].isin(TABLE_3)]["provenance"])))
    return (
        f"`{own.loc[SCRATCH, 'model']}` on {data}: {images}, without labels ({seen:,} seen; the paper's "
        f"ViT-S {PAPERS_IMAGES:,}) and then with labels ({own['epochs'].iloc[0]} epochs; from scratch as many, the "
        f"paper's 400). {tests:,} test images, which alone leave an accuracy uncertain by "
        f"± {own['one_seed_margin'].mean():.1f} points. Brackets: Student's 95 % interval over seeds, where there are "
        "several; ±: of a difference of one seed, over test images alone. A sign is judged from three seeds. The "
        "paper's accuracies are on CIFAR-100 and Tiny-ImageNet, its differences on CIFAR-100."
    )


def _words(value: object) -> str:
    return "" if pd.isna(value) else str(value)


def _missing(ran: Sequence[str]) -> str:
    missing = [f"`{name}`" for name in LINES if name not in ran]
    return f"\n\nNot run: {', '.join(missing)}." if missing else ""


def _figures(folder: Path) -> None:
    rows = read_rows(folder, ROWS)
    if not rows["encoder"].any():
        return
    curves(line_table(rows), place_table(rows), structure_table(rows), folder / "curves.png")


BLOCKS: dict[str, Callable[[Path], str]] = {
    "mp3_table3": table3_block,
    "mp3_settings": settings_block,
    "mp3_places": places_block,
    "mp3_claims": claims_block,
    "mp3_steps": steps_block,
}
MP3 = Rendering("mp3", files, BLOCKS, _figures)
# Rendered into the pages once results are committed.
RENDERINGS = tuple(one for one in (MP3,) if (RESULTS / one.folder).is_dir())
