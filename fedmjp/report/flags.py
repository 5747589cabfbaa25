"""Warnings that an evaluation may be unreliable, after the checks of AutoAttack (Croce and Hein 2020).

Some are raised by a run and stand in its rows (`attacks.observation.Reconstruction.flags`); others show only when rows
are seen side by side, and are added here. `footnotes` puts both into words, for under a table.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedmjp.audit.strongest import gains_over_guesses
from fedmjp.defenses.chain import defense_of_row
from fedmjp.records.rows import BASELINES, CASE, distinct

MEANING = {
    "loss_above_start": "the search ended above its start",
    "gradient_near_zero": "the gradient is nearly zero: a saturated model is no defence",
    "zero_rows_ignored": "position rows are exactly zero and the attack takes them for visible ones",
    "one_mask_assumed": "one mask was assumed for all images of the update",
    "order_guessed": "the update does not hold the order of hidden patches: placed by how they look; not certified",
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
    flags, known = rows["flags"].tolist(), {}
    raised = {"randomised_defence_once": _seen_once(rows)}
    raised["weak_beats_strong"] = _below_a_guess(rows) | _below_fewer_steps(rows)
    for flag, chosen in raised.items():
        for place in np.flatnonzero(chosen):
            own = flags[place]
            if flag not in own:
                flags[place] = known.setdefault((flag, id(own)), [*own, flag])
    return rows.assign(flags=pd.Series(flags, dtype=object, index=rows.index))


def footnotes(rows: pd.DataFrame) -> list[str]:
    """One line a flag: what it means, and how many rows of which attacks raised it."""
    lines, flags = [], rows["flags"].tolist()
    for flag, meaning in MEANING.items():
        raised = np.fromiter((flag in own for own in flags), dtype=bool, count=len(flags))
        if raised.any():
            names = ", ".join(rows["attack"][raised].unique())
            lines.append(f"{flag}: {meaning} ({raised.sum()} of {len(rows)} rows; {names})")
    return lines


def _alike(rows: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """A number for each row, the same for rows that agree in the keys: dictionaries cannot be grouped by."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for key in keys:
        codes = _codes(rows[key])
        numbers = pd.factorize(numbers * (codes.max(initial=0) + 1) + codes)[0]
    return numbers


def _codes(column: pd.Series) -> np.ndarray:
    """A number from 0 for each value, the same where the text of two is; of one object the text is made once."""
    if column.dtype != object:
        return pd.factorize(column, use_na_sentinel=False)[0]
    texts: dict[str, int] = {}
    known = {id(value): texts.setdefault(str(value), len(texts)) for value in distinct(column)}
    return np.fromiter((known[id(value)] for value in column), dtype=np.int32, count=len(column))


def _seen_once(rows: pd.DataFrame) -> np.ndarray:
    """Whether each row is of a defence that draws at random, and of an image that was seen under one draw only."""
    defenses = _alike(rows, ["defense", "defense_parameters"])
    numbers, firsts = np.unique(defenses, return_index=True)
    pairs = zip(rows["defense"].iloc[firsts], rows["defense_parameters"].iloc[firsts], strict=True)
    random = [(found := defense_of_row(*pair)) is not None and found.random for pair in pairs]
    chosen = np.isin(defenses, numbers[random]) & ~rows["attack"].isin(BASELINES).to_numpy()
    if not chosen.any():
        return chosen
    own = rows[["seed", "round", "image_id"]][chosen]
    draws = pd.Series(_alike(own, ["seed", "round"]), index=own.index)
    keys = [_alike(rows, _EXPERIMENT)[chosen], own["image_id"]]
    once = np.zeros(len(rows), dtype=bool)
    once[chosen] = draws.groupby(keys, observed=True).transform("nunique") == 1
    return once


def _below_a_guess(rows: pd.DataFrame) -> np.ndarray:
    """Whether each row is of an attack that is on average worse than the best guess without a gradient."""
    guess, below = rows["attack"].isin(BASELINES).to_numpy(), np.zeros(len(rows), dtype=bool)
    own = ~guess & rows["psnr"].notna().to_numpy()
    alike, guessed = _alike(rows, [*_SETTING, "attack", "attack_parameters"]), _alike(rows, _GUESSED)
    images = _codes(rows["image_id"])
    slim = pd.DataFrame({"attack": rows["attack"].astype("category"), "image_id": images, "psnr": rows["psnr"]})
    for number in np.unique(alike[own]):
        chosen = own & (alike == number)
        first = np.flatnonzero(chosen)[0]
        guesses = guess & (guessed == guessed[first])
        shared = np.intersect1d(images[chosen], images[guesses])
        compared = slim[(chosen | guesses) & np.isin(images, shared)]
        groups = compared.groupby(["image_id", "attack"], as_index=False, observed=True)
        means, name = groups["psnr"].mean(), rows["attack"].iloc[first]
        if len(means) and gains_over_guesses(means, index=["image_id"])[name].mean() < 0:
            below |= chosen
    return below


def _below_fewer_steps(rows: pd.DataFrame) -> np.ndarray:
    """Whether each row is of a search that is on average worse than with fewer steps, on the images of both."""
    own, below = (~rows["attack"].isin(BASELINES) & rows["psnr"].notna()).to_numpy(), np.zeros(len(rows), dtype=bool)
    parameters = distinct(rows["attack_parameters"])
    without = {id(p): {k: v for k, v in p.items() if k != "steps"} for p in parameters}
    steps = np.array([p.get("steps") for p in rows["attack_parameters"]], dtype=float)
    rest = pd.Series([without[id(p)] for p in rows["attack_parameters"]], dtype=object, index=rows.index)
    alike = _alike(rows.assign(attack_parameters=rest), [*_SETTING, "attack", "attack_parameters"])
    searched = own & np.isfinite(steps)
    for number in np.unique(alike[searched]):
        chosen = searched & (alike == number)
        budgets = np.unique(steps[chosen])
        for fewer, more in zip(budgets, budgets[1:], strict=False):
            weak, strong = (rows[["image_id", "psnr"]][chosen & (steps == budget)] for budget in (fewer, more))
            shared = set(weak["image_id"]) & set(strong["image_id"])
            means = [each["psnr"][each["image_id"].isin(shared)].mean() for each in (weak, strong)]
            if means[0] > means[1]:
                below |= chosen & (steps == more)
    return below
