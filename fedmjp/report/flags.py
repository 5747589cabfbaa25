"""Warnings that an evaluation may be unreliable, after the checks of AutoAttack (Croce and Hein 2020).

Some are raised by a run and stand in its rows (`attacks.observation.Reconstruction.flags`); others show only when rows
are seen side by side, and are added here. `footnotes` puts both into words, for under a table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from fedmjp.audit.strongest import gains_over_guesses
from fedmjp.defenses.chain import known_defense
from fedmjp.records.rows import BASELINES, CASE

MEANING = {
    "loss_above_start": "the search ended above its start",
    "gradient_near_zero": "the gradient is nearly zero: a saturated model is no defence",
    "zero_rows_ignored": "position rows are exactly zero and the attack takes them for visible ones",
    "one_mask_assumed": "one mask was assumed for all images of the update",
    "order_guessed": "hidden patches were placed by their borders: the update does not hold their order; not certified",
    "classifier_left_out": "certified by the encoder's gradients: the classifier's are not those of its plain loss",
    "labels_given": "labels were given, not inferred",
    "batch_statistics_assumed": "the model has batch norms: the statistics of the victim's batch were assumed",
    "randomised_defence_once": "the defence draws at random and was seen once for each image",
    "weak_beats_strong": "worse on average than the best guess without a gradient, or than fewer steps",
}
# What rows of one experiment share; an image is then seen under several draws of seed and round.
_EXPERIMENT = [key for key in CASE if key not in ("seed", "round", "client")]
_SETTING = [key for key in _EXPERIMENT if key not in ("attack", "attack_parameters")]
# Guesses know neither model nor defence, and are filed without them.
_GUESSED = ["dataset", "batch_size"]


def with_table_flags(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows, as `load_rows` gives them, with the flags that only a table can raise added to `flags`."""
    rows = rows.reset_index(drop=True)
    extra: list[set[str]] = [set() for _ in range(len(rows))]
    for place in _seen_once(rows):
        extra[place].add("randomised_defence_once")
    for place in (*_below_a_guess(rows), *_below_fewer_steps(rows)):
        extra[place].add("weak_beats_strong")
    flags = [[*own, *sorted(more - set(own))] for own, more in zip(rows["flags"], extra, strict=True)]
    return rows.assign(flags=flags)


def footnotes(rows: pd.DataFrame) -> list[str]:
    """One line a flag: what it means, and how many rows of which attacks raised it."""
    lines = []
    for flag, meaning in MEANING.items():
        raised = rows[[flag in flags for flags in rows["flags"]]]
        if len(raised):
            names = ", ".join(dict.fromkeys(raised["attack"]))
            lines.append(f"{flag}: {meaning} ({len(raised)} of {len(rows)} rows; {names})")
    return lines


def _alike(rows: pd.DataFrame, keys: list[str]) -> pd.Series:
    """A number for each row, the same for rows that agree in the keys: dictionaries cannot be grouped by."""
    codes = {key: pd.factorize(pd.Series(_words(rows[key]), dtype=object), use_na_sentinel=False)[0] for key in keys}
    return pd.DataFrame(codes, index=rows.index).groupby(keys, sort=False).ngroup()


def _words(column: pd.Series) -> list[str]:
    """The values as text; of one and the same object once, as a million rows share their parameters."""
    if column.dtype != object:
        return column.astype(str).tolist()
    known: dict[int, str] = {}
    return [known[id(v)] if id(v) in known else known.setdefault(id(v), str(v)) for v in column]


def _seen_once(rows: pd.DataFrame) -> Iterator[int]:
    chosen = [
        a not in BASELINES and (defense := known_defense(d)) is not None and defense.random
        for d, a in rows[["defense", "attack"]].values
    ]
    random = rows[chosen]
    if random.empty:
        return
    draws = _alike(random, ["seed", "round"])
    counts = draws.groupby([_alike(random, _EXPERIMENT), random["image_id"]]).transform("nunique")
    yield from random.index[counts == 1]


def _below_a_guess(rows: pd.DataFrame) -> Iterator[int]:
    """Rows of attacks that are on average worse than the best guess without a gradient, image by image."""
    guess = rows["attack"].isin(BASELINES)
    own = rows[~guess & rows["psnr"].notna()]
    for _, alike in own.groupby(_alike(own, [*_SETTING, "attack", "attack_parameters"])) if len(own) else ():
        like = rows[guess & (rows[_GUESSED] == alike[_GUESSED].iloc[0]).all(axis=1)]
        shared = set(alike["image_id"]) & set(like["image_id"])
        both = pd.concat([alike, like])
        means = both[both["image_id"].isin(shared)].groupby(["image_id", "attack"], as_index=False)["psnr"].mean()
        if len(means) and gains_over_guesses(means, index=["image_id"])[alike["attack"].iloc[0]].mean() < 0:
            yield from alike.index


def _below_fewer_steps(rows: pd.DataFrame) -> Iterator[int]:
    """Rows of searches that are on average worse than the same search with fewer steps, on the images of both."""
    own = rows[~rows["attack"].isin(BASELINES) & rows["psnr"].notna()]
    steps = own["attack_parameters"].map(lambda p: p.get("steps"))
    rest = own["attack_parameters"].map(lambda p: str({k: v for k, v in p.items() if k != "steps"}))
    for _, alike in own.groupby([_alike(own, [*_SETTING, "attack"]), rest], sort=False) if len(own) else ():
        budgets = sorted(steps[alike.index].dropna().unique())
        for fewer, more in zip(budgets, budgets[1:], strict=False):
            weak, strong = (alike[steps[alike.index] == budget] for budget in (fewer, more))
            shared = set(weak["image_id"]) & set(strong["image_id"])
            means = [each[each["image_id"].isin(shared)]["psnr"].mean() for each in (weak, strong)]
            if means[0] > means[1]:
                yield from strong.index
