"""What the paper says of MP3, as signs of differences that our trainings can confirm or contradict.

A difference is taken within a seed, from trainings on the same images. The paper's own differences are given where it
prints numbers (Table 3, CIFAR-100); of figures only the direction that its text states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from experiments.mp3.measures import CORRELATIONS
from experiments.mp3.options import BRIEF, DEFAULT, SCRATCH
from experiments.mp3.rows import START, TRAINED
from experiments.trainings.verdicts import p_value, with_verdicts
from fedmjp.metrics import t_interval

SAME_IMAGE, SAME_PLACE, OTHER_PLACE = CORRELATIONS
POINTS, SIDE, CORRELATION = "points", "of the side", "correlation"


class Seed:
    """The rows of one seed."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows

    def accuracy(self, line: str) -> float:
        """Top-1 accuracy (%) of a line."""
        return self._values(self.of_line(line), "accuracy")[0]

    def places(self, line: str, eta: float) -> float:
        """Places (%) that a line's encoder finds at the masking ratio `eta`."""
        rows = self.encoder(line)
        return self._values(rows[rows["eta_test"] == eta], "places")[0]

    def neighbours(self, line: str, network: str = TRAINED) -> np.ndarray:
        """(layers,): accuracy (%) of the nearest neighbours by layer of a line's encoder."""
        return self._values(self.encoder(line), "neighbours", network)

    def correlation(self, line: str, name: str) -> float:
        """Of the last block of a line's encoder."""
        return self._values(self.encoder(line), name)[0]

    def distances(self, rows: pd.DataFrame) -> np.ndarray:
        """(layers, heads) of one training."""
        return self._values(rows, "distance").reshape(rows["layer"].nunique(), -1)

    def of_line(self, line: str) -> pd.DataFrame:
        """Rows of a line's training with labels."""
        return self.rows[self.rows["line"] == line]

    def encoder(self, line: str) -> pd.DataFrame:
        """Rows of the pre-training that a line starts from."""
        return self.rows[self.rows["training"] == self.of_line(line)["encoder"].iloc[0]]

    @staticmethod
    def _values(rows: pd.DataFrame, measure: str, network: str = TRAINED) -> np.ndarray:
        own = rows[(rows["measure"] == measure) & (rows["network"] == network)]
        return own.sort_values(["layer", "head"])["value"].to_numpy(float)


@dataclass(frozen=True)
class Claim:
    """One statement of the paper.

    Attributes:
        place: where the paper makes it.
        words: the statement.
        needs: the lines that the difference is computed from.
        difference: of one seed, with the sign that `paper` speaks of.
        paper: the paper's difference, or 1 or -1 where its text only says which is larger.
        printed: whether `paper` is a printed number.
        unit: of the difference.
    """

    place: str
    words: str
    needs: tuple[str, ...]
    difference: Callable[[Seed], float]
    paper: float
    printed: bool = False
    unit: str = POINTS


def _accuracies(place: str, words: str, line: str, other: str, paper: float, printed: bool = False) -> Claim:
    """A difference of the accuracies of two lines."""
    return Claim(place, words, (line, other), lambda s: s.accuracy(line) - s.accuracy(other), paper, printed)


def _neighbours(words: str, difference: Callable[[Seed], float], *needs: str) -> Claim:
    """Of the accuracy of the nearest neighbours by block."""
    return Claim("Figure 9", words, needs, difference, 1)


def _correlations(words: str, name: str) -> Claim:
    """That one kind of pairs of places is more alike than other places of two images."""
    return Claim("Figure 10", words, (DEFAULT,), partial(_more_alike, name=name), 1, unit=CORRELATION)


def _heads(words: str, extreme: Callable[..., np.ndarray], paper: float) -> Claim:
    """Of the distance that each block's most local, or most global, head attends to."""
    return Claim("Figure 8", words, (DEFAULT, SCRATCH), partial(_farther, extreme=extreme), paper, unit=SIDE)


def _more_alike(seed: Seed, name: str) -> float:
    return seed.correlation(DEFAULT, name) - seed.correlation(DEFAULT, OTHER_PLACE)


def _farther(seed: Seed, extreme: Callable[..., np.ndarray]) -> float:
    """Mean over blocks: MP3 minus from scratch."""
    pretrained, scratch = seed.distances(seed.encoder(DEFAULT)), seed.distances(seed.of_line(SCRATCH))
    return float(np.mean(extreme(pretrained, axis=1) - extreme(scratch, axis=1)))


def _fewer_places(seed: Seed) -> float:
    return seed.places("eta_0", 0.9) - seed.places("eta_0", 0.0)


def _least_gain(seed: Seed) -> float:
    return float(np.min(seed.neighbours(DEFAULT) - seed.neighbours(DEFAULT, START)))


def _before_the_last(seed: Seed) -> float:
    found = seed.neighbours(DEFAULT)
    return float(np.max(found[:-1]) - found[-1])


def _best_by_ratio(seed: Seed) -> float:
    return float(np.max(seed.neighbours("eta_0.75")) - np.max(seed.neighbours("eta_0")))


def _changed_last(seed: Seed) -> float:
    """How much more fine-tuning changes the distances of the last block's heads than those of the first."""
    change = np.abs(seed.distances(seed.of_line(DEFAULT)) - seed.distances(seed.encoder(DEFAULT))).mean(axis=1)
    return float(change[-1] - change[0])


CLAIMS = (
    _accuracies("Table 3", "MP3 without positions beats absolute ones from scratch", "mp3_none", SCRATCH, 9.2, True),
    _accuracies("Table 3", "from scratch, no positions are worse than absolute", "scratch_none", SCRATCH, -8.8, True),
    _accuracies("Table 3", "after MP3, no positions are worse than absolute", "mp3_none", DEFAULT, -1.4, True),
    _accuracies("Table 3", "after MP3, relative positions beat absolute", "mp3_relative", DEFAULT, 0.2, True),
    Claim("Figure 3", "trained at η = 0, fewer places are found at 0.9 than at 0", ("eta_0",), _fewer_places, -1),
    _accuracies("Figure 4", "a longer pre-training beats one of a fifth", DEFAULT, BRIEF, 1),
    _accuracies("Figure 4", "three times as long a pre-training is better still", "pretrained_longer", DEFAULT, 1),
    _accuracies("Figure 5", "MP3 with 0.3 of the epochs beats all of them from scratch", "mp3_shorter", SCRATCH, 1),
    _accuracies("Figure 5", "after MP3, more epochs with labels are better", "mp3_longer", "mp3_shorter", 1),
    _accuracies("Figure 6", "η = 0.9 is worse than 0.5", "eta_0.9", BRIEF, -1),
    _accuracies("Figure 7", "MP3 beats from scratch, patches of 16", "mp3_patch_16", "scratch_patch_16", 1),
    _accuracies("Figure 7", "MP3 beats from scratch, patches of 4", "mp3_patch_4", "scratch_patch_4", 1),
    _neighbours("every block's neighbours beat those of random weights (the least gain)", _least_gain, DEFAULT),
    _neighbours("the best block is not the last", _before_the_last, DEFAULT),
    _neighbours("the best block is better at η = 0.75 than at 0", _best_by_ratio, "eta_0", "eta_0.75"),
    _correlations("places of one image are more alike than places of two", SAME_IMAGE),
    _correlations("of two images, the same places are more alike than others", SAME_PLACE),
    _heads("a block's most local head is more local after MP3 than from scratch", np.min, -1),
    _heads("a block's most global head is more global after MP3 than from scratch", np.max, 1),
    Claim(
        "Figure 11",
        "fine-tuning changes the heads of the last block more than those of the first",
        (DEFAULT,),
        _changed_last,
        1,
        unit=SIDE,
    ),
)


def claim_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a claim whose trainings are there: the difference with Student's interval over seeds, and the verdict.

    Returns:
        columns place, claim, unit, seeds, difference_mean, difference_low, difference_high, expected (the sign),
        difference_p, paper_difference (where printed), verdict.
    """
    by_seed = [Seed(group) for _, group in rows.groupby("seed")]
    lines = []
    for claim in CLAIMS:
        able = [seed for seed in by_seed if set(claim.needs) <= set(seed.rows["line"])]
        if not able:
            continue
        differences = np.array([claim.difference(seed) for seed in able])
        found = t_interval(differences)
        line = {"place": claim.place, "claim": claim.words, "unit": claim.unit, "seeds": found.count}
        line |= {"difference_mean": found.mean, "difference_low": found.low, "difference_high": found.high}
        line |= {"expected": int(math.copysign(1, claim.paper)), "difference_p": p_value(differences)}
        lines.append(line | {"paper_difference": claim.paper if claim.printed else math.nan})
    table = pd.DataFrame(lines)
    if not lines:
        return table
    # A claim's sign is tested where the paper prints no figure, too.
    return table.assign(verdict=with_verdicts(table.assign(paper_difference=table["expected"]))["verdict"])
