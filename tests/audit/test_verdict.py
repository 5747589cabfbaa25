"""The verdict on made rows: every answer, what it says, and which attack is called the strongest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedmjp.audit.strongest import gains_over_guesses, ranked, strongest
from fedmjp.audit.verdict import Answer, judge
from fedmjp.records.reasons import grouped, in_one_sentence
from fedmjp.records.rows import METRICS, OPTIONAL
from tests.records.sample_rows import make_row

NAN = float("nan")
GUESSES = {"mean_image": [12.0, 13.0, 14.0, 12.5], "other_image": [8.0, 9.0, 14.5, 7.0]}
FAILED = {"diagnosis": "the update is of 8 images"}


def frame(values: dict[str, Sequence[float]], patches: dict[str, float] | None = None, **more: Any) -> pd.DataFrame:
    """Rows of attacks by their PSNR on one image a client; NaN for no image. `more`: attack -> further columns."""
    rows = []
    for name, psnr in values.items():
        for client, value in enumerate(psnr):
            lost = {} if value == value else dict.fromkeys(METRICS, NAN)
            share = {} if lost else {"patch_recovery": (patches or {}).get(name, 0.0)}
            own = {"attack": name, "client": client, "image_id": str(client), "psnr": value, "threat_model": ["labels"]}
            rows.append(OPTIONAL | make_row(**own | lost | share) | more.get(name, {}))
    return pd.DataFrame(rows)


CASES = {
    "leaks": (dict(best=[65.0, 66.0, 20.0, 67.0], weak=[5.0] * 4), {}, {}, "leaks: 3 of 4 images above 25 dB (best,"),
    "certified": (dict(best=[65.0] * 4), {}, {"best": {"certified": True}}, "4 of 4 images above 25 dB, 4 certified"),
    "partly, by patches": (
        dict(best=[16.0, 17.0, 18.0, 17.0]),
        {"best": 0.3},
        {},
        "partly: no whole image above 25 dB, but 30 [30, 30] % of patches (best,",
    ),
    "partly, patches of an attack with a low PSNR": (
        dict(smooth=[13.0, 14.0, 15.5, 13.5], sharp=[6.0] * 4),
        {"sharp": 0.4},
        {},
        "but 40 [40, 40] % of patches (sharp, median 6.0 dB",
    ),
    "partly, nearer than guesses": (
        dict(best=[16.0, 17.0, 18.0, 17.0]),
        {},
        {},
        "partly: no image and no patch above 25 dB, but nearer to the originals than guesses (best,",
    ),
    "partly, patches out of place": (
        dict(best=[9.0] * 4),
        {},
        {"best": {"certified": True}},
        "partly: no whole image above 25 dB, but 4 of 4 images certified: they reproduce the update",
    ),
    "no leak shown": (
        dict(best=[11.0, 13.0, 15.0, 10.0], other=[8.0] * 4),
        {},
        {},
        "no leak shown by 2 attacks (best, other) on 4 images",
    ),
    "no better than the guesses' patches": (
        dict(best=[11.0] * 4),
        {"best": 0.3, "mean_image": 0.3},
        {},
        "no leak shown by 1 attack (best) on 4 images",
    ),
    "not tested": (
        dict(best=[11.0] * 4, other=[NAN] * 4),
        {},
        {"best": FAILED, "other": FAILED},
        "not tested: the assumptions of 2 attacks (best, other) failed on every update",
    ),
    "diagnosed, and recovers the images all the same": (
        dict(best=[31.0] * 4),
        {},
        {"best": FAILED},
        "leaks: 4 of 4 images above 25 dB (best,",
    ),
    "guesses above 25 dB": (
        dict(mean_image=[27.0] * 4, best=[26.0, 26.5, 25.5, 26.0]),
        {},
        {},
        "no leak shown by 1 attack (best) on 4 images",
    ),
    "one image": (dict(best=[31.0]), {}, {}, "leaks: 1 of 1 image above 25 dB (best, median 31.0 dB, +19.0 dB over"),
    "one image, patches": (dict(best=[18.0]), {"best": 0.5}, {}, "but 50 % of patches (best, median 18.0 dB, +6.0 dB"),
    "one image, patches of a worse answer that are too many for chance": (
        dict(best=[9.0]),
        {"best": 0.2},
        {},
        "but 20 % of patches (best, median 9.0 dB, -3.0 dB",
    ),
    "one image, few patches of a worse answer": (dict(best=[10.0]), {"best": 2 / 64}, {"best": FAILED}, "not tested"),
    "few patches of worse answers": (dict(best=[10.0] * 4), {"best": 2 / 64}, {}, "no leak shown by 1 attack (best)"),
    "few patches of nearer answers": (dict(best=[16.0] * 4), {"best": 2 / 64}, {}, "but 3 [3, 3] % of patches (best"),
    "another view of the image": (
        dict(best=[10.0]),
        {"best": 2 / 64},
        {"best": {"certified": True}},
        "partly: no whole image above 25 dB, but 1 of 1 image certified: they reproduce the update",
    ),
    "one image, a little nearer": (dict(best=[12.2]), {}, {}, "no leak shown by 1 attack (best) on 1 image"),
}


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    values, patches, more, words = CASES[name]
    length = max(map(len, values.values()))
    verdict = judge(frame({n: v[:length] for n, v in GUESSES.items()} | values, patches, **more))
    assert words in verdict.headline()
    if length == 1:
        assert "[" not in verdict.headline()
    text = " ".join([verdict.headline(), *verdict.details()]).lower()
    assert not any(word in text for word in ("safe", "secure", "private", "nan"))


def test_no_rows_and_guesses_alone_test_nothing() -> None:
    assert judge(frame(GUESSES)[:0]).headline() == "not tested: no attack was run"
    assert judge(frame(GUESSES)).answer is Answer.NOT_TESTED


def test_figures_are_paired_with_the_better_guess() -> None:
    verdict = judge(frame(GUESSES | {"best": [30.0, 30.0, 30.0, NAN]}))
    # 18 over 12, 17 over 13, 15.5 over 14.5; without an image the guess is left, a gain of 0.
    assert verdict.gain.mean == pytest.approx((18 + 17 + 15.5 + 0) / 4)
    assert (verdict.gain.count, verdict.psnr, verdict.recovered) == (4, 30.0, 3)


def test_without_guesses_nothing_is_called_better() -> None:
    verdict = judge(frame({"best": [11.0] * 4}))
    assert verdict.answer is Answer.NOT_SHOWN
    assert "Guesses without a gradient were not scored" in " ".join(verdict.details())
    assert judge(frame({"best": [31.0] * 4})).headline() == "leaks: 4 of 4 images above 25 dB (best, median 31.0 dB)"


def test_assumptions_that_held_on_some_updates_only() -> None:
    rows = frame(GUESSES | {"best": [11.0] * 4})
    rows.loc[(rows["attack"] == "best") & (rows["client"] > 0), "diagnosis"] = "x"
    assert judge(rows).headline() == "no leak shown by 1 attack (best) on 1 of 4 images"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"known": 0.9, "certified": True},
            "leaks: 2 of 2 images certified, they reproduce the update (best); the originals are not",
        ),
        (
            {"known": 0.25, "certified": False},
            "partly: best vouches for pixels of 2 of 2 images, but no answer is certified",
        ),
        (
            {"known": 0.0, "certified": False},
            "not tested: nothing that 1 attack (best) returned is certified or vouched for, and the originals are not",
        ),
        ({"known": 0.0, "certified": False} | FAILED, "not tested: the assumptions of 1 attack (best) failed"),
    ],
)
def test_updates_of_which_no_originals_are_known(columns: dict[str, Any], words: str) -> None:
    assert judge(frame({"best": [NAN, NAN]}, best=columns)).headline().startswith(words)


def test_chosen_on_one_half_and_reported_on_the_other() -> None:
    """Two attacks of pure noise: the one that is better on the even updates is reported on the odd ones."""
    even = np.arange(10) % 2 == 0
    lucky = np.where(even, 20.0, 5.0)
    rows = frame({"mean_image": [12.0] * 10, "lucky": lucky, "steady": [11.0] * 10})
    attack, reported, split = strongest(gains_over_guesses(rows))
    assert (attack, split) == ("lucky", True)
    assert sorted(image[2] for image in reported) == [1, 3, 5, 7, 9]
    verdict = judge(rows)
    assert verdict.gain.mean == pytest.approx(-7)
    assert "its figures are of the other" in " ".join(verdict.details())
    assert not judge(rows[rows["client"] < 7]).split
    assert "slightly too high" in " ".join(judge(rows[rows["client"] < 7]).details())
    assert judge(rows[rows["attack"] != "steady"]).gain.count == 10  # nothing was chosen, nothing is held back


def test_images_of_one_update_stay_in_one_half() -> None:
    rows = frame({"mean_image": [12.0] * 16, "a": [13.0] * 16, "b": [11.0] * 16})
    rows = rows.assign(image=rows["client"] % 2, client=rows["client"] // 2)
    _, reported, split = strongest(gains_over_guesses(rows))
    assert split
    assert len(reported) == 8
    assert {image[2] for image in reported} == {1, 3, 5, 7}
    one_update = rows.assign(image=rows["image"] + 2 * rows["client"], client=0)
    assert not strongest(gains_over_guesses(one_update))[2]


def test_attacks_are_compared_where_both_were_run() -> None:
    """`late` was run on two hard images only; its mean is lower, and it is better on both."""
    gains = pd.DataFrame({"early": [30.0, 30.0, 2.0, 2.0], "late": [NAN, NAN, 6.0, 6.0]})
    assert ranked(gains) == ["late", "early"]
    apart = pd.DataFrame({"early": [30.0, 30.0, NAN, NAN], "late": [NAN, NAN, 6.0, 6.0]})
    assert ranked(apart) == ["early", "late"]


def test_equals_are_ranked_by_the_number_of_images() -> None:
    gains = pd.DataFrame({"few": [NAN, NAN, 88.0, 90.0], "many": [85.0, 84.0, 87.0, 89.0], "none": [NAN] * 4})
    assert ranked(gains) == ["many", "few"]  # both are exact copies


def test_what_was_not_tested_is_listed_by_reason() -> None:
    not_run = {
        "slow": "takes about 30 s, beyond the budget of 10 s an update (--budget)",
        "slower": "takes about 31 s, beyond the budget of 10 s an update (--budget)",
        "other": "needs labels",
    }
    rows = frame(GUESSES | {"best": [11.0] * 4, "bad": [NAN] * 4}, bad=FAILED)
    assert judge(rows, not_run).gaps() == [
        "Assumptions failed: bad: the update is of 8 images.",
        "Not run: slow, slower: takes about 30 to 31 s, beyond the budget of 10 s an update (--budget).",
        "Not run: other: needs labels.",
    ]
    assert "Granted to the adversary: labels." in judge(rows, not_run).details()


def test_reasons_that_differ_in_numbers_are_one() -> None:
    assert (
        in_one_sentence(["19 of 64 rows in blocks.0", "5 of 64 rows in blocks.0"]) == "5 to 19 of 64 rows in blocks.0"
    )
    assert grouped({"a": "2 steps", "b": "2 rows", "c": "8 steps"}) == {"2 to 8 steps": ["a", "c"], "2 rows": ["b"]}


@pytest.mark.parametrize(("shares", "answer"), [((0.8, 0.0, 0.0, 0.0), "partly"), ((0.04, 0.0, 0.0, 0.0), "no leak")])
def test_few_images_with_patches_are_not_reassuring(shares: tuple[float, ...], answer: str) -> None:
    rows = frame({"best": [11.0, 12.0, 10.0, 11.0], "mean_image": [12.0, 13.0, 11.0, 12.0]})
    rows.loc[rows["attack"] == "best", "patch_recovery"] = shares
    verdict = judge(rows)
    assert verdict.patches.low == 0
    assert verdict.headline().startswith(answer)


@pytest.mark.parametrize(
    ("defense", "attack", "known"),
    [
        ("mjp", "patch_embedding", ", none of which knows mjp,"),
        ("mjp:gamma=0.1", "dlg", ", none of which knows mjp,"),
        ("mjp", "mjp_subspace", ""),
        ("none", "dlg", ""),
        ("of another package", "dlg", ""),
    ],
)
def test_a_defence_that_no_attack_knew_is_said_so(defense: str, attack: str, known: str) -> None:
    values = {attack: [8.0, 9.0, 10.0, 9.0], **GUESSES}
    verdict = judge(frame(values, **dict.fromkeys(values, {"defense": defense})))
    assert verdict.answer is Answer.NOT_SHOWN
    assert verdict.headline() == f"no leak shown by 1 attack ({attack}){known.rstrip(',')} on 4 images"
    gaps = [line for line in verdict.gaps() if "No attack that knows mjp was tested; those that do: mjp_sub" in line]
    assert len(gaps) == bool(known)


def alone(values: dict[str, Sequence[float]], name: str, **more: Any) -> pd.DataFrame:
    """The frame without the rows of one attack beyond its first image: it was run on one update."""
    rows = frame(values, **more)
    return rows[(rows["attack"] != name) | (rows["client"] == 0)]


def test_an_attack_on_one_image_is_not_the_strongest_of_eight() -> None:
    exact = [106.0, 110.0, 100.0, 11.3, 105.0, 120.0, 9.0, 10.0][::-1]
    leaks = judge(alone({"mean_image": [15.0] * 8, "exact": exact, "search": [12.7] * 8}, "search"))
    assert (leaks.answer, leaks.attack) == (Answer.LEAKS, "exact")
    near = judge(alone({"mean_image": [12.0] * 8, "solve": [20.0, 19.0] * 4, "search": [20.1] * 8}, "search"))
    assert (near.answer, near.attack) == (Answer.PARTLY, "solve")


def test_what_leaks_is_told_with_an_attack_that_brought_an_image() -> None:
    """One image is exact and the others worse than guesses; another attack is a little better on all."""
    verdict = judge(frame({"mean_image": [12.0] * 8, "exact": [90.0] + [6.0] * 7, "steady": [12.5] * 8}))
    assert verdict.headline().startswith("leaks: 1 of 8 images above 25 dB (exact, ")
    assert verdict.by_attack == {"exact": 1}


def test_an_attack_that_is_surely_nearer_counts_although_another_was_chosen() -> None:
    """Two clients in turn, eight rounds: on one half of the updates A is better, on the other B, and B on both."""
    gains = {"mean_image": [12.0] * 16, "a": [24.0, 11.0] * 8, "b": [23.0] * 16}
    assert judge(frame(gains)).answer is Answer.PARTLY


@pytest.mark.parametrize(("psnr", "answer"), [(24.9, Answer.PARTLY), (14.0, Answer.NOT_SHOWN)])
def test_a_clear_gain_on_a_single_image_is_a_finding(psnr: float, answer: Answer) -> None:
    assert judge(frame({"mean_image": [12.0], "best": [psnr]})).answer is answer


@pytest.mark.parametrize(
    ("others", "psnr", "share", "answer"),
    [(0, 24.9, 0.4, Answer.PARTLY), (99, 24.9, 0.4, Answer.PARTLY), (99, 14.0, 0.4, Answer.NOT_SHOWN)]
    + [(99, 24.9, 0.15, Answer.NOT_SHOWN)],
)
def test_one_image_in_part_is_a_finding_among_many(others: int, psnr: float, share: float, answer: Answer) -> None:
    """Alone or among 99 images of which nothing came back; unless it is hardly nearer, or few of its patches are."""
    rows = frame({"best": [psnr] + [11.0] * others, "mean_image": [12.0] * (others + 1)})
    rows.loc[(rows["attack"] == "best") & (rows["client"] == 0), "patch_recovery"] = share
    found = judge(rows)
    assert found.answer is answer
    if others and answer is Answer.PARTLY:
        assert found.headline().startswith("partly: no whole image above 25 dB, but a part of 1 of 100 images, clearly")


def test_how_often_the_assumptions_of_an_attack_held_is_said() -> None:
    rows = frame({"mean_image": [12.0] * 4, "weak": [11.0] * 4, "strong": [11.0] * 4})
    rows.loc[(rows["attack"] == "strong") & (rows["client"] > 0), "diagnosis"] = "the update is of 8 images"
    verdict = judge(rows)
    assert verdict.held == {"weak": 4, "strong": 1}
    assert "by 2 attacks (weak, strong on 1 of them)" in verdict.headline()


def test_a_certificate_is_evidence_without_originals_and_without_known_patches() -> None:
    rows = frame({"own": [NAN] * 2}, own={"certified": True, "known": NAN})
    verdict = judge(rows)
    assert verdict.answer is Answer.LEAKS
    assert "2 of 2 images certified" in verdict.headline()


def guessed_order(found: float, guess: float, **more: Any) -> pd.DataFrame:
    """Rows of an attack whose answer holds patches in no order, and of a guess: their shares in any place."""
    rows = frame(
        {"mean_image": [12.0] * 4, "pieces": [9.0] * 4}, pieces={"flags": ["order_guessed"], "any_place": found} | more
    )
    return rows.assign(any_place=rows["any_place"].where(rows["attack"] == "pieces", guess).astype(float))


def test_patches_whose_order_the_update_does_not_hold_are_a_finding() -> None:
    verdict = judge(guessed_order(0.9, 0.1))
    assert verdict.answer is Answer.PARTLY
    assert "90 [90, 90] % of patches, in an order that the update does not hold (pieces," in verdict.headline()
    alone = guessed_order(0.9, 0.1)
    assert "but 90 % of patches, in an order" in judge(alone[alone["client"] == 0]).headline()


@pytest.mark.parametrize(
    ("what", "rows"),
    [
        ("the guess has as many", guessed_order(0.3, 0.3)),
        ("the attack claims its order", guessed_order(0.9, 0.1, flags=[])),
        ("guesses of an older file were not scored so", guessed_order(0.9, NAN)),
    ],
)
def test_patches_in_any_place_do_not_count_where(what: str, rows: pd.DataFrame) -> None:
    assert judge(rows).answer is Answer.NOT_SHOWN, what


@pytest.mark.parametrize(("residual", "answer"), [(1e-6, Answer.PARTLY), (0.3, Answer.NOT_TESTED)])
def test_patches_that_reproduce_the_update_are_evidence_without_originals(residual: float, answer: Answer) -> None:
    evidence = {"known": 0.0, "residual": residual, "flags": ["order_guessed"]}
    verdict = judge(frame({"pieces": [NAN] * 2}, pieces=evidence))
    assert verdict.answer is answer
    words = "the patches that pieces found reproduce the update for 2 of 2 images, but the update does not hold their"
    assert (words in verdict.headline()) is (answer is Answer.PARTLY)
