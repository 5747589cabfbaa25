"""The one rule that turns scored attacks into a verdict: leaks, partly, no leak shown, or not tested.

Terminal, page, tables and flags all use it. An attack counts as far as it is better than the best guess that needs no
gradient (mean image or another image, whichever is nearer to the original), image by image; where it returned no image
the adversary is left with that guess, so its gain there is 0.

1. *leaks*: at least one attack brought at least one image above `RECOGNISABLE` dB, nearer to the original than any
   guess. A diagnosis does not count against it.
2. *partly*: no whole image, but an attack brought more patches above that PSNR than the best guess did, or the
   strongest attack is better than the best guess, each by an interval that excludes 0, or any attack is on the images
   that it was run on (intervals corrected for the number of attacks). One image has no interval: there the share of
   patches decides by its value, and a gain of `CLEAR_GAIN` dB. With few images the interval of the patches is wide: one
   that includes 0 but also reaches more than `NEGLIGIBLE_SHARE` is *partly* too. An answer that is farther from the
   original than a guess has flat patches that agree by chance (2 of 64 when a mirrored image is compared with the
   original); its patches count only if their share, or its interval, exceeds `NEGLIGIBLE_SHARE`. Where an answer says
   that the order of its patches was a guess, they count in any place (`fedmjp.audit.patches`). An image that an attack
   brought `CLEAR_GAIN` dB nearer than any guess, and `CLEAR_SHARE` more of its patches above that PSNR, makes the
   answer *partly* whatever the mean over all images says. An answer that is certified although it is far from the
   original is *partly* too: its patches are in other places, or the client fed another view.
3. *no leak shown*: attacks whose assumptions held were run and none of this was found. That is a statement on those
   attacks under those grants, not on the defence; attacks that did not run are listed with their reasons.
4. *not tested*: no attack's assumptions held on any update.

Where the originals are not known (a running app of somebody else), nothing can be scored: then *leaks* means that an
answer is certified (it reproduces the update, `attacks.certificate`), *partly* that an attack vouches for pixels, or
reproduces the update with patches whose order the update does not hold.

Which attack is the strongest: `fedmjp.audit.strongest`. Intervals are 95 % bootstrap intervals over images; over one
image there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from attacks.certificate import TOLERANCE
from fedmjp.audit.patches import CLEAR_GAIN, IN_PLACE, most_patches, order_guessed, partly_shown, patch_gains
from fedmjp.audit.strongest import IMAGE, ByImage, above_guesses, strongest
from fedmjp.defenses import Defense
from fedmjp.defenses.chain import chain_name, defense_of_row
from fedmjp.metrics import Interval, bootstrap_mean, psnr_in_words
from fedmjp.records.reasons import grouped, in_one_sentence, pattern
from fedmjp.records.rows import ANY_PLACE, BASELINES, distinct

RECOGNISABLE = 25.0  # dB
NONE = Interval(float("nan"), float("nan"), float("nan"), 0)
UNSCORED = "no pixel is vouched for, no answer certified, and without the originals nothing else shows what leaks"


class Answer(StrEnum):
    """The four verdicts. There is no word for "safe"."""

    LEAKS = "leaks"
    PARTLY = "partly"
    NOT_SHOWN = "no leak shown"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Verdict:
    """What the attacks on one model under one defence amount to.

    Attributes:
        answer: see the module.
        attack: the attack that decides, which the figures are of; "" where none returned an image.
        images: number of images that any attack was run on.
        tested: images on which the assumptions of at least one attack held.
        recovered: images that at least one attack brought above `RECOGNISABLE` dB, nearer than the best guess.
        by_attack: attack -> such images of its own, most first.
        certified: images whose reconstruction reproduces the update.
        partial: images that the attack brought in part, where these decide; no mean over the images shows them.
        psnr: median of the attack on the reported images, dB.
        gain: dB of the attack over the best guess, on the reported images; NaN where no guess was scored.
        patches: share of patches in [0, 1] that the attack brought above `RECOGNISABLE` dB, on the reported images.
        any_place: those patches are counted in any place, because the attack says that their order was a guess.
        split: the attack was chosen on other updates than those that the figures are of.
        scored: the originals were known; if not, `recovered` counts the images for which an attack vouches.
        held: attacks whose assumptions held on at least one update -> the images for which they held; where the
            originals are not known, those for which the attack vouched for something.
        failed: attacks that ran and whose assumptions failed on every update -> their most common diagnosis; where the
            originals are not known, also those that vouched for nothing.
        not_run: registered attacks that did not run -> reason.
        grants: what the adversary was granted.
        defense: name of the defence, "" where there is none or it is not registered here.
        knowing: registered attacks that take the defence into account (`Defense.known_by`).
    """

    answer: Answer
    attack: str = ""
    images: int = 0
    tested: int = 0
    recovered: int = 0
    by_attack: Mapping[str, int] = field(default_factory=dict)
    certified: int = 0
    partial: int = 0
    psnr: float = float("nan")
    gain: Interval = NONE
    patches: Interval = NONE
    any_place: bool = False
    split: bool = False
    scored: bool = True
    held: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)
    grants: tuple[str, ...] = ()
    defense: str = ""
    knowing: tuple[str, ...] = ()

    @property
    def unaware(self) -> bool:
        """Whether a defence is under test and no attack that knows it held on any update."""
        return bool(self.defense) and not set(self.knowing) & set(self.held)

    def headline(self) -> str:
        """The answer with its figures, one line."""
        return f"{self.answer}{' ' if self.answer is Answer.NOT_SHOWN else ': '}{self.reason()}"

    def reason(self) -> str:
        """The headline without the answer."""
        bar = f"{RECOGNISABLE:.0f} dB"
        if self.answer is Answer.LEAKS and not self.scored:
            number = f"{self.certified} of {_images(self.images)}"
            return f"{number} certified, they reproduce the update ({self.attack}); the originals are not known"
        if self.answer is Answer.LEAKS:
            sure = f", {self.certified} certified" if self.certified else ""
            return f"{self.recovered} of {_images(self.images)} above {bar}{sure} ({self._figures()})"
        if self.answer is Answer.PARTLY and not self.scored:
            number = f"{self.recovered} of {_images(self.images)}"
            if self.any_place:
                return (
                    f"the patches that {self.attack} found reproduce the update for {number}, but the update does not "
                    "hold their order, and the originals are not known"
                )
            return (
                f"{self.attack} vouches for pixels of {number}, but no answer is certified, and the originals are not "
                "known"
            )
        if self.answer is Answer.PARTLY:
            return self._partly(bar)
        if self.answer is Answer.NOT_SHOWN:
            of = f"{self.tested} of " if self.tested < self.images else ""
            known = f", none of which knows {self.defense}" if self.unaware else ""
            named = ", ".join(n if c == self.tested else f"{n} on {c} of them" for n, c in self.held.items())
            return f"by {_count(self.held, 'attack')} ({named}){known} on {of}{_images(self.images)}"
        if not self.failed:
            return "no attack was run"
        if UNSCORED in self.failed.values():
            ran = f"{_count(self.failed, 'attack')} ({', '.join(self.failed)})"
            return f"nothing that {ran} returned is certified or vouched for, and the originals are not known"
        return f"the assumptions of {_count(self.failed, 'attack')} ({', '.join(self.failed)}) failed on every update"

    def _partly(self, bar: str) -> str:
        """What is known of images of which none is above the bar, by what decides."""
        if self.partial:
            number = f"a part of {self.partial} of {_images(self.images)}"
            return f"no whole image above {bar}, but {number}, clearly nearer than guesses ({self._figures()})"
        nearer = self.gain.mean > 0 and self.patches.mean > 0
        if self.certified and not nearer:
            number = f"{self.certified} of {_images(self.images)}"
            return (
                f"no whole image above {bar}, but {number} certified: they reproduce the update, so that patches are "
                f"known, if not in their places or in the view that is the original ({self._figures()})"
            )
        share = self._share()
        if not self.patches.mean > 0:
            return f"no image and no patch above {bar}, but nearer to the originals than guesses ({self._figures()})"
        if self.patches.count > 1 and not self.patches.low > 0 and self.gain.low > 0:
            return (
                f"no whole image above {bar} and {share}, but nearer to the originals than guesses ({self._figures()})"
            )
        return f"no whole image above {bar}, but {share} ({self._figures()})"

    def _share(self) -> str:
        order = ", in an order that the update does not hold" if self.any_place else ""
        return f"{_interval(self.patches, 100, '{:.0f}')} % of patches{order}"

    def details(self) -> list[str]:
        """What stands behind the headline and what was not tested, one sentence a line."""
        return [*self.summary(), *self.gaps()]

    def summary(self) -> list[str]:
        """What stands behind the headline, one sentence a line."""
        lines = []
        if self.attack and self.scored and self.answer in (Answer.NOT_SHOWN, Answer.NOT_TESTED):
            lines.append(f"Strongest attack: {self._figures()}, {self._share()} above {RECOGNISABLE:.0f} dB.")
        if self.attack and self.scored and self.split:
            lines.append("The strongest attack was chosen on one half of the updates; its figures are of the other.")
        elif self.attack and self.scored and len(self.held) + len(self.failed) > 1:
            lines.append("The strongest attack was chosen on the same images; its figures are slightly too high.")
        if len(self.by_attack) > 1:
            counts = ", ".join(f"{name} {count}" for name, count in self.by_attack.items())
            lines.append(f"Images above {RECOGNISABLE:.0f} dB by attack: {counts}.")
        if self.images and self.scored and not self.gain.count:
            lines.append("Guesses without a gradient were not scored, so there is nothing to compare with.")
        if self.grants:
            lines.append(f"Granted to the adversary: {', '.join(self.grants).replace('_', ' ')}.")
        return lines

    def gaps(self) -> list[str]:
        """What was not tested, a sentence a reason: attacks that know the defence, those whose assumptions failed, and
        those that did not run."""
        knowing = [self._knowing()] if self.unaware else []
        failed = knowing + [
            f"{'Not scored' if reason == UNSCORED else 'Assumptions failed'}: {', '.join(names)}: {reason}."
            for reason, names in grouped(self.failed).items()
        ]
        return failed + [f"Not run: {', '.join(names)}: {reason}." for reason, names in grouped(self.not_run).items()]

    def _knowing(self) -> str:
        if not self.knowing:
            return f"No registered attack knows the defence {self.defense}: an adaptive attack may do better."
        return f"No attack that knows {self.defense} was tested; those that do: {', '.join(self.knowing)}."

    def _figures(self) -> str:
        text = f"{self.attack}, " + (f"median {psnr_in_words(self.psnr)}" if self.psnr == self.psnr else "no image")
        if not self.gain.count:
            return text
        return f"{text}, {_interval(self.gain, 1, '{:+.1f}')} dB over the best guess without a gradient"


def judge(rows: pd.DataFrame, not_run: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on one line of a table: one model, block and defence.

    Args:
        rows: as `load_rows` gives them, the guesses' rows among them.
        not_run: registered attacks that did not run -> reason.
    """
    attacked, names = ~rows["attack"].isin(BASELINES), rows["attack"].astype(object)
    ran, held = list(dict.fromkeys(names[attacked])), attacked & _held(rows)
    by_image, certified = ByImage.of(rows), attacked & rows["certified"].eq(True)
    scored = not (attacked.all() and rows["psnr"].isna().all() and (rows["known"].notna() | certified).any())
    vouched, pieces = (rows["diagnosis"] == "") & (rows["known"].astype(float) > 0), _reproduced(rows)
    if not scored:  # an answer that vouches for nothing shows neither that something leaks nor that nothing does
        held &= certified | vouched | pieces

    def counted(chosen: pd.Series) -> int:
        """Images of the rows that are chosen."""
        return len(np.unique(by_image.places[chosen.to_numpy()]))

    held_on = {name: counted(held & (names == name)) for name in ran}
    held_on = {name: count for name, count in held_on.items() if count}
    shared: dict[str, Any] = {
        "images": counted(attacked),
        "tested": counted(held),
        "certified": counted(certified),
        "held": held_on,
        "failed": {
            name: _diagnosis(rows["diagnosis"][names == name], "no image was returned" if scored else UNSCORED)
            for name in ran
            if name not in held_on
        },
        "not_run": dict(not_run or {}),
        "grants": tuple(
            dict.fromkeys(grant for granted in distinct(rows["threat_model"][attacked]) for grant in granted)
        ),
        **_defense_of(rows.loc[attacked, [name for name in ("defense", "defense_parameters") if name in rows]]),
    }
    nothing = Answer.NOT_SHOWN if held_on else Answer.NOT_TESTED
    if not scored:
        if pieces.any() and not shared["certified"]:
            return _without_originals(names[pieces], counted(pieces), shared, nothing, any_place=True)
        return _without_originals(
            names[certified if shared["certified"] else vouched], counted(vouched), shared, nothing
        )
    gains, psnr = by_image.gains("psnr"), by_image.values("psnr")
    if gains.empty:
        return Verdict(nothing, **shared)
    above = (psnr.loc[gains.index, gains.columns] > RECOGNISABLE) & (gains > 0)
    counts = above.sum().sort_values(ascending=False, kind="stable")
    shared |= {"recovered": int(above.any(axis=1).sum()), "by_attack": counts[counts > 0].to_dict()}
    answer, figures = _decided(by_image, gains, counts, nothing if not shared["certified"] else Answer.PARTLY)
    return Verdict(answer, **shared, **figures)


def _decided(
    by_image: ByImage, gains: pd.DataFrame, counts: pd.Series, otherwise: Answer
) -> tuple[Answer, dict[str, Any]]:
    """The answer where guesses and attacks were scored, and the figures of the attack that decides.

    Args:
        gains: in PSNR, as `gains_over_guesses` gives them.
        counts: attack -> images above the bar.
        otherwise: the answer where no attack gains anything.
    """
    in_patches, columns = patch_gains(by_image)

    def figures_of(name: str, reported: pd.MultiIndex | None = None, split: bool = False) -> dict[str, Any]:
        """Figures of an attack on the reported images; by default on all that it was run on."""
        reported = gains.index[gains[name].notna()] if reported is None else reported
        return _figures_of(by_image.rows, gains, name, reported, columns.get(name, IN_PLACE)) | {"split": split}

    leaks = counts.max() > 0
    best = strongest(gains)
    if leaks and not counts[best[0]]:  # the figures beside "leaks" are those of an attack that brought an image
        best = strongest(gains[counts.index[counts > 0]])
    figures = figures_of(*best)
    if leaks:
        return Answer.LEAKS, figures
    partial = most_patches(in_patches, gains)
    if partial:
        more = figures_of(partial)
        surely = partial != best[0] and more["patches"].count > 1 and more["patches"].low > figures["patches"].mean
        # The strongest attack by PSNR may not be the one that gives patches away.
        return Answer.PARTLY, more if surely or not figures["patches"].mean > 0 else figures
    gain = figures["gain"]
    if gain.low > 0 if gain.count > 1 else gain.mean > CLEAR_GAIN:
        return Answer.PARTLY, figures
    other = above_guesses(gains) if gain.count else ""
    if other:
        return Answer.PARTLY, figures_of(other)
    parts = partly_shown(in_patches, gains).sum()
    if gain.count and parts.max() > 0:
        return Answer.PARTLY, figures_of(parts.idxmax()) | {"partial": int(parts.max())}
    return otherwise, figures


def _defense_of(rows: pd.DataFrame) -> dict[str, Any]:
    """`defense` and `knowing` of a verdict on rows of one defence."""
    labels = sorted(map(str, rows["defense"].unique()))
    options = rows["defense_parameters"].iloc[0] if labels and "defense_parameters" in rows else {}
    defense = defense_of_row(labels[0], options) if labels else None
    if len({chain_name(label) for label in labels}) != 1 or defense is None or type(defense) is Defense:
        return {}
    return {"defense": chain_name(labels[0]), "knowing": defense.known_by}


def _figures_of(
    rows: pd.DataFrame, gains: pd.DataFrame, attack: str, reported: pd.MultiIndex, patches: str
) -> dict[str, Any]:
    own = rows.loc[rows["attack"] == attack, [*IMAGE, "psnr", patches]]
    own = own.iloc[pd.MultiIndex.from_frame(own[IMAGE]).get_indexer_for(reported)]
    guessed = rows.loc[rows["attack"].isin(BASELINES), "psnr"].notna().any()
    return {
        "attack": attack,
        "psnr": float(own["psnr"].median()),
        "gain": bootstrap_mean(gains[attack].to_numpy()[gains.index.get_indexer(reported)]) if guessed else NONE,
        "patches": bootstrap_mean(own[patches].fillna(0.0).to_numpy(dtype=float)),
        "any_place": patches == ANY_PLACE,
    }


def _reproduced(rows: pd.DataFrame) -> pd.Series:
    """Whether each answer reproduces its update with patches whose order the update does not hold."""
    return order_guessed(rows) & (rows["residual"].astype(float) <= TOLERANCE)


def _without_originals(
    attacks: pd.Series, recovered: int, shared: Mapping[str, Any], nothing: Answer, *, any_place: bool = False
) -> Verdict:
    """The verdict on updates of which only the adversary's own evidence is known.

    Args:
        attacks: of each answer that is certified, or where none is, that vouches for pixels or for patches in no order.
        recovered: images of answers that vouch for them.
        any_place: it is patches in no order.
    """
    answer = Answer.LEAKS if shared["certified"] else Answer.PARTLY if len(attacks) else nothing
    name = attacks.mode().iloc[0] if len(attacks) else ""
    return Verdict(answer, **shared, scored=False, attack=name, recovered=recovered, any_place=any_place)


def _held(rows: pd.DataFrame) -> pd.Series:
    """Whether the attack returned an image without a diagnosis, a row each."""
    returned = rows["psnr"].notna() | rows["known"].notna() | rows["certified"].eq(True)
    return returned & (rows["diagnosis"] == "")


def _diagnosis(texts: pd.Series, otherwise: str) -> str:
    """What an attack says most often, in one sentence; `otherwise` where it says nothing."""
    texts = texts[texts != ""].astype(object)
    if texts.empty:
        return otherwise
    patterns = texts.map(pattern)
    return in_one_sentence(texts[patterns == patterns.value_counts().index[0]])


def _interval(interval: Interval, scale: float, shape: str) -> str:
    """A mean with its interval; over one image the value alone."""
    mean, low, high = (shape.format(scale * v) for v in interval[:3])
    return mean if interval.count <= 1 else f"{mean} [{low}, {high}]"


def _images(count: int) -> str:
    return f"{count} image{'s' * (count != 1)}"


def _count(names: Any, noun: str) -> str:
    return f"{len(names)} {noun}{'s' * (len(names) != 1)}"
