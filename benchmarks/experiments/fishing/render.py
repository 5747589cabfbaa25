"""What is rendered from the rows of large batches and an active server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from attacks.active.classifier_attack import AUTO
from experiments.rendering import Rendering, csv, markdown_table, read_rows
from fedmjp.audit.verdict import RECOGNISABLE
from fedmjp.records.rows import BASELINES
from fedmjp.report.styles import NORMAL, SMALL, WIDTH, dress, save, style
from fedmjp.report.words import defence_words

PASSIVE = "patch_embedding"
MOST = 0.8  # share of the images that came back, of lines that are drawn
LINE = ["dataset", "model", "weights", "defense", "setting", "batch_size", "seed"]


def fishing_files(folder: Path) -> dict[str, str]:
    """table.csv: PSNR and images by case and attack; rounds.csv: images that came back by round."""
    rows = read_rows(folder)
    rows = rows.assign(attack=[_named(*both) for both in zip(rows["attack"], rows["attack_parameters"], strict=True)])
    ordered = rows.sort_values("round", kind="stable")  # an image that was attacked again counts with the most rounds
    rows = ordered.drop_duplicates([*LINE, "attack", "image_id"], keep="last").sort_index()
    return {"table.csv": csv(_table(rows), 4), "rounds.csv": csv(_by_round(rows), 4)}


def fishing_block(folder: Path) -> str:
    """The table as Markdown, a line for each case; the other attacks' medians in columns of their own."""
    table = pd.read_csv(folder / "table.csv")
    heads = ["model", "labels", "update", "images", "defence", "attack", "came back"]
    heads += ["PSNR, median (dB)", "least", "rounds"]
    lines = []
    for key, own in table.groupby(LINE, sort=False):
        _, model, weights, defense, setting, size, seed = key
        of = own.set_index("attack")
        active = [name for name in of.index if name not in (*BASELINES, PASSIVE)]
        for name in active:
            row = of.loc[name]
            labels, _, update = setting.partition(" labels")
            cells = [f"{model}, {_training(weights)}", labels]
            cells += [update.removeprefix(", ") or "one step", size_cell(size, seed, table)]
            came = f"{row['recovered']} of {row['count']}"
            figures = [f"{row[name]:.1f}" if row[name] == row[name] else "–" for name in ("psnr_median", "psnr_min")]
            figures.append(f"{row['rounds']}")
            lines.append([*cells, defence_words(defense), f"`{name}`", came, *figures])
    return markdown_table(heads, lines)


def size_cell(size: int, seed: int, table: pd.DataFrame) -> str:
    """The images of a batch, and the seed that drew it where a table has several."""
    return str(size) + f", seed {seed}" * (table["seed"].nunique() > 1)


def _training(weights: str) -> str:
    """What a line says of the weights."""
    if "NOT TRAINED" in weights:
        return "random"
    return "trained encoder" if weights.startswith("encoder of") else "trained"


def passive_block(folder: Path) -> str:
    """The same cases without the server's turn to send: medians (dB) of the closed form and of the mean image."""
    table = pd.read_csv(folder / "table.csv")
    wide = table.pivot_table(index=LINE, columns="attack", values="psnr_median", sort=False)
    low, high = wide[PASSIVE].min(), wide[PASSIVE].max()
    guess = wide["mean_image"]
    return (
        f"With the same batches and the model as it is, `{PASSIVE}` returns a mixture: medians of {low:.1f} to "
        f"{high:.1f} dB over the {len(wide)} cases of the table, and the mean image has {guess.min():.1f} to "
        f"{guess.max():.1f} dB."
    )


def rounds_figure(folder: Path) -> None:
    """Draw the share of a client's images that came back against the rounds, and the rounds until the last one did
    against their number, where the server sees the gradient of one client without defence, and had rounds for all."""
    table = pd.read_csv(folder / "rounds.csv")
    reached = table.groupby([*LINE, "attack"])["recovered"].transform("max") / table["count"]
    plain = (table["defense"] == "none") & ~table["setting"].str.contains(",")
    table = table[(reached > MOST) & plain]
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    shares, needed = figure.subplots(1, 2)
    cases = list(table.groupby(["model", "setting", "attack"], sort=False).groups)
    looks = {case: style(index) for index, case in enumerate(dict.fromkeys(cases))}
    ends: dict[tuple[str, ...], list[tuple[int, int]]] = {case: [] for case in looks}
    for (_, model, _, _, setting, size, _, attack), own in table.groupby([*LINE, "attack"], sort=False):
        case = model, setting, attack
        share = own["recovered"] / own["count"]
        shares.plot([0, *own["round"]], [0, *share], drawstyle="steps-post", **looks[case] | {"marker": ""})
        if share.max() == 1:
            ends[case].append((int(size), int(own[share == 1]["round"].min())))
    for case, points in ends.items():
        model, setting, attack = case
        sizes, rounds = zip(*sorted(points), strict=True) if points else ((), ())
        needed.plot(sizes, rounds, label=f"{attack}, {model}, {setting}", **looks[case])
    shares.set_xscale("symlog", linthresh=8)
    needed.set_xscale("log", base=2)
    needed.set_yscale("log", base=2)
    shares.set_xlabel("prepared rounds", fontsize=NORMAL)
    shares.set_ylabel(f"share of images above {RECOGNISABLE:.0f} dB", fontsize=NORMAL)
    needed.set_xlabel("images of the client", fontsize=NORMAL)
    needed.set_ylabel("rounds until the last came back", fontsize=NORMAL)
    for axes in (shares, needed):
        dress(axes, "y")
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False)
    save(figure, folder / "rounds.png")


def _named(attack: str, parameters: Mapping[str, Any]) -> str:
    """The attack, with the one that reads its images where that is not its own choice, and for other local steps."""
    reader, steps = parameters.get("reader", AUTO), parameters.get("local_steps", "one")
    return attack + f" with {reader}" * (reader != AUTO) + f", local_steps={steps}" * (steps != "one")


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for key, own in rows.groupby([*LINE, "attack"], sort=False):
        lines.append(dict(zip([*LINE, "attack"], key, strict=True)) | summary(own))
    return pd.DataFrame(lines)


def summary(rows: pd.DataFrame) -> dict[str, Any]:
    """The columns of a line of table.csv that follow from its rows."""
    psnr = rows["psnr"].dropna()
    counts = {"count": len(rows), "recovered": int((psnr > RECOGNISABLE).sum()), "failed": len(rows) - len(psnr)}
    sizes = {"psnr_median": psnr.median(), "psnr_min": psnr.min(), "psnr_max": psnr.max()}
    return counts | sizes | {"rounds": int(_rounds(rows).max()), "seconds_median": rows["seconds"].median()}


def _by_round(rows: pd.DataFrame) -> pd.DataFrame:
    """Images above the bar after each round, over all clients of a case."""
    lines = []
    for key, own in rows[~rows["attack"].isin((*BASELINES, PASSIVE))].groupby([*LINE, "attack"], sort=False):
        when = _rounds(own[own["psnr"] > RECOGNISABLE])
        for number in range(1, int(_rounds(own).max()) + 1):
            line = dict(zip([*LINE, "attack"], key, strict=True)) | {"round": number, "count": len(own)}
            lines.append(line | {"recovered": int((when <= number).sum())})
    return pd.DataFrame(lines)


def _rounds(rows: pd.DataFrame) -> pd.Series:
    return rows["details"].map(lambda details: details["rounds"]).astype(int)


FISHING = Rendering(
    "fishing", fishing_files, {"fishing": fishing_block, "fishing_passive": passive_block}, rounds_figure
)
RENDERINGS = (FISHING,)
