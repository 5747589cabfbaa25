"""Warnings that only a table shows, and their words."""

from __future__ import annotations

import pandas as pd

from fedmjp.report.flags import MEANING, footnotes, with_table_flags
from tests.records.sample_rows import make_row


def frame(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def flags(rows: pd.DataFrame) -> list[list[str]]:
    return with_table_flags(rows)["flags"].tolist()


def test_a_randomised_defence_is_to_be_seen_more_than_once() -> None:
    once = make_row(defense="mjp", image_id="a")
    assert flags(frame(once, make_row(defense="none", image_id="a"))) == [["randomised_defence_once"], []]
    assert flags(frame(once, once | {"seed": 8})) == [[], []]
    assert flags(frame(once, once | {"round": 2})) == [[], []]


def test_options_decide_whether_a_defence_draws() -> None:
    """Wherever they were given: in the defence's label or beside it."""
    usual, random = ({"topk_share": 0.1, "topk_choice": choice} for choice in ("largest", "random"))
    rows = frame(
        make_row(defense="topk", defense_parameters=usual, image_id="a"),
        make_row(defense="topk", defense_parameters=random, image_id="b"),
        make_row(defense="topk:topk_choice=random", defense_parameters=random, image_id="c"),
    )
    assert flags(rows) == [[], ["randomised_defence_once"], ["randomised_defence_once"]]


def test_an_attack_below_a_guess_is_told() -> None:
    guess = make_row(attack="mean_image", attack_parameters={}, model="(no gradient)", defense="none", psnr=12.0)
    attack = {"attack": "gradvit", "defense": "none"}
    assert flags(frame(guess, make_row(**attack, psnr=11.0))) == [[], ["weak_beats_strong"]]
    assert flags(frame(guess, make_row(**attack, psnr=13.0))) == [[], []]
    # Only images that both have seen count, and only the same size of batch.
    assert flags(frame(guess, make_row(**attack, psnr=11.0, image_id="other"))) == [[], []]
    assert flags(frame(guess, make_row(**attack, psnr=11.0, batch_size=2))) == [[], []]


def test_more_steps_are_to_do_no_harm() -> None:
    few = make_row(attack="gradvit", defense="none", attack_parameters={"steps": 10, "tv": 0.1}, psnr=15.0)
    many = few | {"attack_parameters": {"steps": 100, "tv": 0.1}, "psnr": 14.0}
    assert flags(frame(few, many)) == [[], ["weak_beats_strong"]]
    assert flags(frame(few, many | {"psnr": 16.0})) == [[], []]
    assert flags(frame(few, many | {"attack_parameters": {"steps": 100, "tv": 0.2}})) == [[], []]


def test_flags_of_runs_are_kept_and_put_into_words() -> None:
    rows = with_table_flags(frame(make_row(defense="mjp", flags=["labels_given"]), make_row(defense="none", seed=9)))
    assert rows["flags"].tolist() == [["labels_given", "randomised_defence_once"], []]
    lines = footnotes(rows)
    assert [line.split(":")[0] for line in lines] == ["labels_given", "randomised_defence_once"]
    assert "(1 of 2 rows; closed_form)" in lines[0]
    assert all(MEANING.values())
