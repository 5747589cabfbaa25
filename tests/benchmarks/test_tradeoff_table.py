"""Lines of the accuracy-privacy plane from rows that are made by hand: names, shares, the strongest attack, labels."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from experiments.tradeoff import figure
from experiments.tradeoff.table import final_accuracy, point_of, recognised, reidentified, tradeoff_table

from fedmjp.defenses import DEFENSES
from tests.records.sample_rows import make_row


def test_the_strongest_attack_by_hand() -> None:
    def rows(attack: str, values: list[float], **changes) -> list[dict]:
        common = {"attack": attack, "attack_parameters": {}, "partition": "iid", "point": "none", **changes}
        return [make_row(client=c, image_id=f"i{c}", psnr=v, **common) for c, v in enumerate(values)]

    # The strongest is the one that is better on the updates that both were run on.
    many, few = rows("patch_embedding", [20.0, 30.0, 40.0, 30.0]), rows("unmix", [22.0, 40.0])
    weak, guess = rows("april", [5.0, 6.0, 7.0, 6.0]), rows("mean_image", [99.0, 12.0, 10.0, 11.0])
    rounds = pd.DataFrame({"partition": "iid", "point": "none", "seed": 0, "round": [0, 2], "accuracy": [0.1, 0.25]})
    table = tradeoff_table(
        pd.DataFrame(guess + weak + few + many), rounds.assign(test_images=8), {"dlg": "not run: for a reason"}
    ).set_index("attack")
    assert table.index[table["strongest"].astype(bool)].tolist() == ["unmix"]
    assert table.loc["patch_embedding", "psnr_mean"] == 30
    assert table.loc["unmix", "gain_mean"] == pytest.approx(31 - (99 + 12) / 2)
    assert np.isnan(table.loc["mean_image", "gain_mean"])
    assert table.loc["april", "gain_mean"] == pytest.approx((5 + 6 + 7 + 6 - 99 - 12 - 10 - 11) / 4)
    assert table.loc["dlg", "note"] == "not run: for a reason"
    assert table.loc["april", ["accuracy_mean", "rounds"]].tolist() == [0.25, 2]


def test_accuracy_of_several_seeds_is_over_all_their_images() -> None:
    rounds = pd.DataFrame({"seed": [0, 1], "round": [5, 5], "accuracy": [0.2, 0.4], "test_images": [10, 10]})
    found = final_accuracy(rounds)
    assert (found["accuracy_mean"], found["test_images"], found["seeds"]) == (pytest.approx(0.3), 20, 2)
    assert 0 <= found["accuracy_low"] < 0.3 < found["accuracy_high"] <= 1


def test_a_point_is_named_alike_from_options_and_from_rows() -> None:
    options = vars(DEFENSES.get("lora")())
    assert point_of("lora", options, "vit_mini_32") == "lora"
    assert point_of("lora", json.loads(json.dumps(options)), "vit_mini_32") == "lora"
    assert point_of("dp_sgd:dp_epsilon=8", {"dp_epsilon": None}, "vit_mini_32") == "dp_sgd, dp_epsilon = 8"
    assert point_of("withheld", {"train_only": ["biases", "head"]}, "") == "withheld, train_only = biases and head"


def test_an_image_that_did_not_come_back_is_not_found() -> None:
    rows = pd.DataFrame([make_row(client=c, attack="april", psnr=p) for c, p in enumerate([30.0, 30.0, None, None])])
    ranks = pd.DataFrame({"rank": [1, 2], "candidates": [50, 50]})
    found = reidentified(rows, ranks)
    assert (found["reidentified_mean"], found["candidates"]) == (0.25, 50)
    assert 0 < found["reidentified_low"] < 0.25 < found["reidentified_high"] < 1
    nothing = reidentified(rows[2:], ranks[:0])
    assert (nothing["reidentified_mean"], nothing["reidentified_low"]) == (0, 0)
    assert reidentified(rows, ranks[:0]) == {}  # the ranks were not measured


def test_an_image_that_did_not_come_back_is_not_recognised() -> None:
    near, far, absent = {"psnr": 30.0, "lpips": 0.1}, {"psnr": 30.0, "lpips": 0.11}, {"psnr": None, "lpips": None}
    rows = pd.DataFrame([make_row(client=c, attack="april", **row) for c, row in enumerate([near, far, far, absent])])
    found = recognised(rows)
    assert found["recognised_mean"] == 0.25
    assert 0 < found["recognised_low"] < 0.25 < found["recognised_high"] < 1
    assert recognised(rows[3:])["recognised_mean"] == 0
    assert recognised(rows[:2].assign(lpips=np.nan)) == {}  # LPIPS was not measured


def test_labels_that_would_overlap_are_moved_up_and_the_others_stay() -> None:
    places = np.array([[52.0, 0.0], [50.0, 1.0], [51.0, 0.0], [35.0, 0.0], [52.0, 90.0]])
    size = np.array([7.0, 6.0])
    moved = figure._apart(places, size)
    np.testing.assert_array_equal(moved[:, 0], places[:, 0])
    np.testing.assert_array_equal(moved[:, 1], [0.0, 12.0, 6.0, 0.0, 90.0])
