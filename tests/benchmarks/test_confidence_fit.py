"""The claims that the calibration counts, and the fit of the confidence behind them."""

from __future__ import annotations

import calibration
import confidence
import numpy as np
import pandas as pd
import pytest
import torch
from experiments.calibration.protocol import vouched_right
from experiments.calibration.render import calibration_block, calibration_table
from experiments.confidence.options import Options
from experiments.confidence.protocol import COLUMNS, fit_folder, logistic_regression, reserved
from PIL import Image

from attacks import Reconstruction, UsageError
from fedmjp.audit.harness import Scored
from fedmjp.data import load_gallery
from fedmjp.models import build_model
from fedmjp.records.rows import load_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration")
    options = ["--num-images", "2", "--gammas", "0.3", "--updates", "1", "2", "--threads", "1", "--out", str(out)]
    assert calibration.main(options) == 0
    return out


def test_rows_hold_what_was_claimed_and_what_of_it_is_right(folder) -> None:
    rows = load_rows(folder / "rows.jsonl.gz")
    assert len(rows) == 2 * 4
    for _, row in rows.iterrows():
        claimed, right = row["known"], row["patch_recovery"]
        assert 0 <= row["details"]["vouched_right"] <= min(claimed, right) + 1e-9
        if row["attack"] == "patch_embedding":
            assert row["diagnosis"]
            assert claimed == 0
        else:
            assert row["details"]["vouched"] == pytest.approx(claimed)


def test_a_line_without_a_claim_says_so(folder) -> None:
    table = pd.read_csv(folder / "table.csv")
    assert table["claims"].tolist() == [0, 2, 2, 2]
    block = calibration_block(folder)
    assert block.count("no claim") == 1
    assert "of the 3 lines in which the attack makes a claim" in block


def test_table_of_made_up_rows() -> None:
    def row(known: float, recovery: float, true: float) -> dict:
        common = {"model": "m", "weights": "w", "attack": "a", "round": 1, "defense_parameters": {"gamma": 0.3}}
        scores = {"known": known, "patch_recovery": recovery, "certified": recovery == 1, "residual": 1e-5}
        return common | scores | {"details": {"vouched_right": true}, "diagnosis": ""}

    line = calibration_table(pd.DataFrame([row(0.5, 0.4, 0.3), row(0.1, 1.0, 0.1)])).iloc[0]
    assert line["vouched_mean"] == pytest.approx(0.3)
    assert line["right_mean"] == pytest.approx(0.7)
    assert line["excess_mean"] == pytest.approx(-0.4)
    assert line["claims_right"] == pytest.approx(0.4 / 0.6)
    assert (line["certified"], line["certified_right"], line["claims"]) == (1, 1, 2)


def test_vouched_right_counts_patches() -> None:
    built = build_model("vit_mini_64", num_classes=8, weights="random")
    original = torch.zeros(1, 3, 64, 64)
    answer, known = original.clone(), torch.zeros(1, 1, 64, 64, dtype=torch.bool)
    answer[..., :8, 8:16] = 1.0  # the second patch is wrong
    known[..., :8, :24] = True  # the first three are claimed
    scored = Scored("a", {}, answer, [{}], 0.0, "", Reconstruction(answer, known), known)
    assert vouched_right(scored, original, built) == pytest.approx(2 / 64)
    assert vouched_right(Scored("a", {}, None, [{}], 0.0, "x"), original, built) == 0.0


def test_logistic_regression_finds_odds_and_weights() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    right = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    weights = torch.ones(8, dtype=torch.float64)
    constant, slope = logistic_regression(x, right, weights).tolist()
    assert constant == pytest.approx(-np.log(3))  # odds 1 to 3
    assert constant + slope == pytest.approx(np.log(3))  # odds 3 to 1
    weights[0] = 3.0  # now 3 to 3
    assert logistic_regression(x, right, weights)[0] == pytest.approx(0.0, abs=1e-9)


def test_photographs_of_the_fit_are_not_those_of_the_tables(tmp_path) -> None:
    for name in "abcdefghijkl":
        Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    fitted = reserved(Options(images=str(tmp_path), reserved=4, num_images=4), 8).images.ids
    scored = load_gallery(str(tmp_path), size=8, limit=8).images.ids
    assert sorted([*fitted, *scored]) == [f"{name}.png" for name in "abcdefghijkl"]
    with pytest.raises(UsageError, match="too few to set 7 aside"):
        reserved(Options(images=str(tmp_path), reserved=7, num_images=4), 8)


def test_fit_notes_patches_and_adds_up_models(tmp_path) -> None:
    options = ["--images", "photos", "--reserved", "4", "--num-images", "4", "--gammas", "0.5", "--updates", "1", "2"]
    assert confidence.main([*options, "--threads", "1", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.npz")
    patches = np.load(file)["patches"]
    assert patches.shape == (4 * 2 * 64, len(COLUMNS))
    assert set(np.unique(patches[:, :3])) == {0.0, 1.0}
    curves = pd.read_csv(tmp_path / "curves.csv")
    assert curves["patches"].sum() == len(patches)
    pd.testing.assert_frame_equal(fit_folder(tmp_path), curves, check_exact=False, rtol=1e-6)
