"""The accuracy-privacy plane of several federations: accuracy and leakage under each defence.

Rows have two more columns than others: `partition` (how the data are distributed over clients) and `point` (the defence
with its strength, in words). Leakage is the PSNR of whole images, higher = more leakage.

Which attack is the strongest, and what it gains over the best guess without a gradient: `fedmjp.audit.verdict`. An
adversary without the originals would not know which attack that is: the figure is that of one who believes the right
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from attacks.observation import SUPERVISED
from experiments.client_recipes import PLAIN
from experiments.rendering import MEAN, interval, markdown_table
from fedmjp.audit.aggregate import sum_in_words, summed_clients
from fedmjp.audit.patches import IN_PLACE, most_patches, patch_gains
from fedmjp.audit.strongest import ByImage, strongest
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.chain import split_chain
from fedmjp.metrics import bootstrap_mean
from fedmjp.metrics.intervals import wilson
from fedmjp.records.rows import ANY_PLACE
from fedmjp.report.tables import summarise

# Stands under the table.
NOTES = """\
*One federation, not two.* Learning wants large batches, closed forms invert batches of one. Both hold at once where
many clients send the gradient of one image each (FedSGD): every update that moves the model is one that is attacked, at
the weights at which it was made, and `--clients` is the batch of a step. Plain descent and its rate were chosen on
undefended runs of 150 rounds with 32 clients (500 test images, one seed): 28 % at rate 0.03, 19 % at 0.1, 27 % with
momentum 0.9, 26 to 29 % with Adam. All defences train at that one rate, none is tuned.

*What the plane can tell.* What each defence costs over the first rounds of training, from the same weights, images
and order of clients; and what an honest-but-curious server with these attacks sees of those rounds. Attacks over
several rounds get every earlier update of their client; at the defaults no image comes twice in those.

*What it cannot tell.* The models are barely trained: what a defence costs at 90 % accuracy, and how late rounds leak,
is not shown. The interval of the accuracy is over test images; another seed may move it by as much. The last column of
the first table counts patches in any place where the update does not hold their order. At 32 pixels in patches of 4 a
patch has 48 values and there are 64 patches; attacks that need it the other way round say so. Searches run for few
steps (`--steps`) on few updates (`--at-most`), where papers take thousands: their failure proves nothing.
"""

# Stands under a table of federations that start at trained weights.
TRAINED_NOTES = """\
*From trained weights.* Every federation starts at the same checkpoint and fine-tunes by plain descent: many clients
send the gradient of one batch each, so that every update that moves the model is one that is attacked, at the weights
at which it was made. All defences train at one rate, none is tuned, and the checkpoint was trained on these images.

*What the plane can tell.* What each defence costs over these rounds, from the same weights, images and order of
clients; and what an honest-but-curious server with these attacks sees of them.

*What it cannot tell.* What a defence costs in a training from the start, or at rates tuned for it. Intervals are over
test images and updates; another seed may move both. Where the update does not hold the order of patches, the column of
patches counts them in any place, and the measures of whole images are those of a guessed order. Searches run for few
steps (`--steps`) on few updates (`--at-most`), where papers take thousands: their failure proves nothing.
"""

# Stands under every table in which originals were looked for among other images.
RANKED_NOTES = """\
*Original nearest*: the share of attacked images of which the original is nearer to what the strongest attack returned
than every other candidate, images of the test set, by features of LPIPS' network; by chance it is one in the number of
candidates. *LPIPS* is a distance: 0 for equal images, lower is more of a leak. *Recognisable*: the share of attacked
images that came back within an LPIPS of 0.1; nine in ten of the originals from 0.05 to 0.1 away from what an attack
returned were the nearest of 1,000, under half of those beyond at 32 pixels.
"""

# Stands under the table of objectives.
OBJECTIVE_NOTES = """\
*Accuracy* is that of a linear probe: logistic regression on the features of the frozen encoder after the last round,
fitted to at most 5,000 labelled training images; under `supervised` too, so that the column compares encoders and not
classifiers. The figure also shows the probe at the weights before the first round. Features are the class token, or the
mean of the patches where places are predicted (`mp3`, `droppos`), whose class token is not trained. Under `mst` attacks
are scored against the two global crops that the client fed, and their count is that of crops.

*What the plane cannot tell.* All encoders are barely trained, and each objective learns at the rate that suits plain
descent on labels; the papers' recipes differ and take hundreds of epochs. Differences of accuracy within the intervals
say nothing of the objectives.
"""

PLACE = ("partition", "point")
BY = (*PLACE, "attack")
# LPIPS (squeeze) up to which an image counts as recognised. Of 19,996 images that attacks returned on the two planes
# of trained models (32 and 160 pixels), the original was the nearest of 1,000 for 89 and 100 % of those at 0.05 to 0.1,
# and for 45 and 100 % of those at 0.1 to 0.15.
RECOGNISED = 0.1
STRENGTHS = {"gamma": "γ", "noise_multiplier": "σ"}


def tradeoff_table(
    rows: pd.DataFrame, rounds: pd.DataFrame, reasons: Mapping[str, str], ranks: pd.DataFrame | None = None
) -> pd.DataFrame:
    """One line a partition, defence and attack; guesses without a gradient first.

    Args:
        rows: as `load_rows` gives them, with `partition` and `point`.
        rounds: columns partition, point, seed, round, accuracy (in [0, 1]) and test_images.
        reasons: why attacks were not run; they, and attacks that ran in another federation only, have lines too.
        ranks: columns partition, point, seed, round, client, image, attack, rank (of the original among candidates, by
            their distance from the reconstruction) and candidates; None where they were not measured.

    Returns:
        The columns `BY`; `strongest` (bool); those of `summarise`; `steps` (of a search, else NaN); `gain_mean` with
        `gain_low` and `gain_high` (dB over the best guess on the same updates); `note` (why there is no image, or why
        not to trust it); where there are ranks `reidentified_mean` with `reidentified_low` and `reidentified_high`
        (share of the attacked images of rank 1, Wilson's interval) and `candidates`; `recognised_mean` with its bounds
        (share of the attacked images within an LPIPS of `RECOGNISED`) where LPIPS was measured; `psnr_by_round` (mean
        PSNR in dB at each attacked round, "ROUND=dB" and spaces between); the federation's `most_patches`
        (the attack that brings most patches above 25 dB), `any_place` and `patches_found_mean` with its bounds
        (`fedmjp.audit.patches`); its `accuracy_mean` with `accuracy_low` and `accuracy_high` (95 % bootstrap interval
        over test images), `test_images`, `rounds` and `seeds`.
    """
    lines, names = [], dict.fromkeys([*rows["attack"], *reasons])
    for place, own in rows.groupby(list(PLACE), sort=False):
        measured = summarise(own, ("attack",)).to_dict("records")
        by_image, of_attack = ByImage.of(own), dict(iter(own.groupby("attack", sort=False)))
        gains = by_image.gains("psnr")
        best = strongest(gains)[0]
        final = final_accuracy(_own(rounds, place)) | _patches(by_image, gains)
        ranked_here = None if ranks is None else _own(ranks, place)
        for line in measured:
            attacked = of_attack[line["attack"]]
            line |= {"strongest": line["attack"] == best, "steps": _steps(attacked), "note": _note(line, attacked)}
            line |= recognised(attacked) | {"psnr_by_round": _by_round(attacked)}
            if ranked_here is not None:
                line |= reidentified(attacked, ranked_here[ranked_here["attack"] == line["attack"]])
            lines.append(_placed(place, line | _gain(gains.get(line["attack"], pd.Series(dtype=float))) | final))
        known = {line["attack"] for line in measured}
        for name in (name for name in names if name not in known):
            absent = {"attack": name, "note": reasons.get(name, "not run in this federation")}
            lines.append(_placed(place, absent | {"count": 0, "failed": 0, "strongest": False} | final))
    table = pd.DataFrame(lines)
    first = [*BY, "strongest", "count", "failed", "steps"]
    return table[[*first, *(name for name in table.columns if name not in first)]]


def reidentified(rows: pd.DataFrame, ranks: pd.DataFrame) -> dict[str, float]:
    """Share of one attack's images whose original is the nearest candidate, which counts as missed without an answer.

    Args:
        rows: of one attack in the federations of one line.
        ranks: of its reconstructions.
    """
    if ranks.empty and rows["psnr"].notna().any():  # a guess, or a federation whose ranks were not measured
        return {}
    first = int((ranks["rank"] == 1).sum())
    return _share("reidentified", first, len(rows)) | {"candidates": ranks["candidates"].max()}


def recognised(rows: pd.DataFrame) -> dict[str, float]:
    """Share of one attack's images within an LPIPS of `RECOGNISED`; none without an answer, {} without any LPIPS."""
    if rows["psnr"].notna().any() and rows["lpips"].isna().all():
        return {}
    return _share("recognised", int((rows["lpips"] <= RECOGNISED).sum()), len(rows))


def _share(name: str, hits: int, count: int) -> dict[str, float]:
    """Columns of a share with Wilson's interval."""
    low, high = wilson(np.array([hits / count]), count)
    bounds = (hits / count, max(float(low[0]), 0.0), float(high[0]))
    return {f"{name}{part}": value for part, value in zip(MEAN, bounds, strict=True)}


def _by_round(rows: pd.DataFrame) -> str:
    """Mean PSNR of one attack's answers at each round where it gave any."""
    means = rows.groupby("round")["psnr"].mean().dropna()
    return " ".join(f"{number}={mean:.1f}" for number, mean in means.items())


def _own(table: pd.DataFrame, place: Sequence[str]) -> pd.DataFrame:
    """The lines of one partition and point."""
    return table[(table[list(PLACE)] == [*place]).all(axis=1)]


def final_accuracy(rounds: pd.DataFrame) -> dict[str, float]:
    """Accuracy after the last round, in [0, 1], with its interval over the test images of all seeds."""
    last = rounds[rounds["round"] == rounds["round"].max()]
    right = [round(a * n) for a, n in zip(last["accuracy"], last["test_images"], strict=True)]
    total = int(last["test_images"].sum())
    interval = bootstrap_mean(np.arange(total) < sum(right))
    bounds = {"accuracy_mean": interval.mean, "accuracy_low": interval.low, "accuracy_high": interval.high}
    return bounds | {"test_images": total, "rounds": int(rounds["round"].max()), "seeds": len(last)}


def placed(rows: pd.DataFrame, recipes: Mapping[str, str]) -> pd.DataFrame:
    """Rows of federations, as `load_rows` gives them, with the columns partition and point.

    Args:
        recipes: how the clients trained, by run_id; `PLAIN` for runs that are not named.
    """
    names = rows[["defense", "defense_parameters", "model"]].itertuples(index=False, name=None)
    partitions = [setting.split(", ")[1] for setting in rows["setting"]]
    points = [under_objective(point_of(*name), own) for name, own in zip(names, rows["objective"], strict=True)]
    own = rows["run_id"].map(recipes).fillna(PLAIN)
    sums = [sum_in_words(summed_clients(setting), alone=False) for setting in rows["setting"]]
    points = [under_recipe(point, recipe) + seen for point, recipe, seen in zip(points, own, sums, strict=True)]
    return rows.assign(partition=partitions, point=points)


def point_of(defense: str, parameters: Mapping[str, Any], model: str) -> str:
    """A defence with its strength, in words; "nope" for an undefended model without position embeddings; a
    chain as it is written.

    Args:
        defense: as --defense takes it; the settings that it names are its strength.
        parameters: the defence's options, for one that names none: its strength, or what differs from the defaults.
        model: the name of the model that is trained.
    """
    if defense == "none":
        return "nope" if model.endswith("_nope") else "none"
    (name, settings), *more = split_chain(defense)
    if more:
        return defense
    if settings:
        return ", ".join([name, *(f"{option} = {value}" for option, value in settings.items())])
    for option, symbol in STRENGTHS.items():
        if option in parameters:
            return f"{defense}, {symbol} = {parameters[option]:g}"
    usual = vars(DEFENSES.get(defense)()) if defense in DEFENSES else {}
    read = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}  # JSON has no tuples
    changed = {k: " and ".join(v) if isinstance(v, tuple) else v for k, v in read.items() if usual.get(k) != v}
    return ", ".join([defense, *(f"{k} = {v}" for k, v in changed.items())])


def under_objective(point: str, objective: str) -> str:
    """A defence in words (`point_of`), with the objective under which it stands unless that is the supervised one."""
    if objective == SUPERVISED:
        return point
    return objective if point in ("none", "nope") else f"{objective}, {point}"


def under_recipe(point: str, recipe: str) -> str:
    """A point in words with the recipe of its clients, unless they feed one image and send its gradient."""
    return point if recipe == PLAIN else f"{point}, {recipe}"


def markdown(table: pd.DataFrame, kind: str = "defence") -> str:
    """Two tables: a line a federation with its strongest attack; and PSNR by attack, a column a federation.

    Args:
        kind: what a point is, for the head of its column.
    """
    places = list(table[list(PLACE)].drop_duplicates().itertuples(index=False, name=None))
    heads = ["partition", kind, "accuracy (%)", "strongest attack", "PSNR (dB)", "over the best guess", "SSIM"]
    numbers = _attacked_rounds(table)
    heads += [f"at rounds {', '.join(map(str, numbers))} (dB)", "updates", "most patches above 25 dB"]
    cells = [[*place, *_cells(_own(table, place), numbers, ranked(table))] for place in places]
    if ranked(table):
        heads += ["LPIPS", "recognisable", f"original nearest of {table['candidates'].max():,.0f}"]
    parts = [markdown_table(heads, cells)]
    cells = []
    for attack, own in table.groupby("attack", sort=False):
        by = own.set_index(list(PLACE))
        numbers = sorted({int(n) for n in own["count"] if n}) or [0]
        name = f"`{attack}`" + (f", {own['steps'].max():.0f} steps" if own["steps"].notna().any() else "")
        cells.append([name, _range(numbers), *(_psnr(by, place) for place in places)])
    heads = [f"{point}, {partition}" for partition, point in places]
    parts.append(markdown_table(["PSNR (dB) of", "updates", *heads], cells))
    return "\n\n".join([*parts, *_notes(table)])


def ranked(table: pd.DataFrame) -> bool:
    """Whether it was measured how often an original is the nearest candidate."""
    return "candidates" in table and bool(table["candidates"].notna().any())


def _attacked_rounds(table: pd.DataFrame) -> list[int]:
    """Rounds at which a strongest attack answered, in any federation."""
    texts = table.loc[table["strongest"].astype(bool), "psnr_by_round"]
    return sorted({int(part.split("=")[0]) for text in texts for part in text.split()})


def _cells(own: pd.DataFrame, rounds: Sequence[int], ranked: bool) -> list[str]:
    """Accuracy, name, PSNR, gain, SSIM, PSNR at each round and count of a federation's strongest attack, and who brings
    most patches; where originals were `ranked`, LPIPS and the shares of those recognised and found."""
    any_line = own.iloc[0]
    bounds = [100 * any_line[f"accuracy{part}"] for part in MEAN]
    accuracy = f"{bounds[0]:.1f} [{bounds[1]:.1f}, {bounds[2]:.1f}]"
    best = own[own["strongest"]]
    if best.empty:
        return [accuracy, "none returned an image", "", "", "", "", "", _most(any_line), *[""] * (3 * ranked)]
    line = best.iloc[0]
    gain = f"{line.gain_mean:+.1f} [{line.gain_low:+.1f}, {line.gain_high:+.1f}]"
    found = interval(line, "psnr", 1, MEAN), gain, interval(line, "ssim", 2, MEAN)
    by_round = dict(part.split("=") for part in line.psnr_by_round.split())
    found += (", ".join(by_round.get(str(number), "–") for number in rounds),)
    cells = [accuracy, f"`{line.attack}`", *found, str(int(line["count"] - line["failed"])), _most(any_line)]
    if ranked:
        cells += [interval(line, "lpips", 2, MEAN), _percent(line, "recognised"), _percent(line, "reidentified")]
    return cells


def _percent(line: pd.Series, name: str) -> str:
    """A share with its interval; "" where it was not measured."""
    share, low, high = (100 * line.get(f"{name}{part}", np.nan) for part in MEAN)
    return "" if np.isnan(share) else f"{share:.0f} [{low:.0f}, {high:.0f}] %"


def _most(line: pd.Series) -> str:
    """The attack that brings most patches, and their share."""
    if not line["most_patches"]:
        return "none"
    order = ", in no order" if line["any_place"] else ""
    share, low, high = (100 * line[f"patches_found{part}"] for part in MEAN)
    bounds = f" [{low:.0f}, {high:.0f}]" if np.isfinite([low, high]).all() else ""
    return f"{share:.0f}{bounds} %{order} (`{line['most_patches']}`)"


def _psnr(by: pd.DataFrame, place: tuple[str, str]) -> str:
    if place not in by.index:
        return ""
    line = by.loc[place]
    if line["count"] == 0:
        return "not run"
    if np.isnan(line["psnr_mean"]):
        return "no image"
    text = f"{line['psnr_mean']:.1f}"
    return (f"**{text}**" if line["strongest"] else text) + ("" if line["note"] == "" else " *")


def _notes(table: pd.DataFrame) -> list[str]:
    """Every reason once for each defence, with the attacks that give it."""
    noted = table[table["note"] != ""]
    noted = noted.assign(reason=[_reason(line) for line in noted.to_dict("records")])
    lines = []
    for (reason, point), own in noted.groupby(["reason", "point"], sort=False):
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(own["attack"]))
        lines.append(f"- {point}: {names}: {reason}")
    return ['\\* and "no image", why:', "\n".join(lines)] if lines else []


def _reason(line: Mapping[str, Any]) -> str:
    """A line's note without its count of updates."""
    if line["count"] == 0:
        return line["note"]
    return ("no image" if line["failed"] == line["count"] else "not vouched for") + f"; {line['diagnosis']}"


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _placed(place: tuple[str, str], line: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(PLACE, place, strict=True)) | dict(line)


def _steps(rows: pd.DataFrame) -> float:
    return float(rows["attack_parameters"].iloc[0].get("steps", np.nan))


def _note(line: Mapping[str, Any], rows: pd.DataFrame) -> str:
    """The attack's most common diagnosis, without the figures of single updates."""
    diagnosed = int((rows["diagnosis"] != "").sum())
    if not diagnosed:
        return ""
    kind = "no image" if line["failed"] == line["count"] else "not vouched for"
    return f"{kind} on {diagnosed} of {line['count']} updates, mostly: {line['diagnosis']}"


def _patches(by_image: ByImage, psnr: pd.DataFrame) -> dict[str, Any]:
    """The attack that brings most patches of one federation above 25 dB, and their share; no name where none does.

    Args:
        psnr: gains in PSNR, as `gains_over_guesses` gives them.
    """
    gains, columns = patch_gains(by_image)
    best, rows = most_patches(gains, psnr), by_image.rows
    shares = rows.loc[rows["attack"] == best, columns.get(best, IN_PLACE)]
    share = bootstrap_mean(shares.fillna(0.0).to_numpy(dtype=float))
    found = {"most_patches": best, "any_place": columns.get(best) == ANY_PLACE}
    return found | dict(zip((f"patches_found{part}" for part in MEAN), share[:3], strict=True))


def _gain(gains: pd.Series) -> dict[str, float]:
    interval = bootstrap_mean(gains.to_numpy())
    return {"gain_mean": interval.mean, "gain_low": interval.low, "gain_high": interval.high}
