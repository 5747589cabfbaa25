"""benchmarks/pretraining.py: every start runs and resumes, differences are of the same images, mistakes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pretraining
import pytest
from experiments.pretraining.start_options import STARTS, StartOptions
from experiments.pretraining.start_render import ROWS, answers, comparison, files
from experiments.rendering import read_rows
from scipy import stats

from attacks import UsageError

SMALL = ["--data", "photos", "--train-limit", "16", "--labelled", "8", "--test-limit", "8", "--batch-size", "8"]
SMALL += ["--pretraining-epochs", "1", "--epochs", "1", "--warmup-epochs", "0", "--precision", "float32"]


def run(folder, *options: str) -> int:
    places = ["--out", str(folder / "out"), "--pretrained", str(folder / "pre")]
    return pretraining.main([*SMALL, *places, *options])


def test_every_start_is_fine_tuned_with_and_without_mjp(tmp_path) -> None:
    assert run(tmp_path, "--starts", "scratch", "droppos") == 0
    first = read_rows(tmp_path / "out", ROWS)
    assert run(tmp_path, "--resume") == 0
    rows = read_rows(tmp_path / "out", ROWS)
    pd.testing.assert_frame_equal(rows[: len(first)], first)
    assert set(rows["start"]) == set(STARTS)
    assert len(rows) == 2 * len(STARTS) + len(STARTS) - 1
    assert (rows[rows["defense"] == ""]["train_limit"] == 16).all()
    tuned = rows[rows["defense"] != ""]
    assert (tuned["train_limit"] == 8).all()
    assert set(tuned["model"]) == {"vit_micro8_32", "vit_micro8_32_mjp"}
    for start, objective in {name: one.objective for name, one in STARTS.items() if one}.items():
        assert tuned[tuned["start"] == start]["weights"].str.contains(f"pre-trained by {objective}", regex=False).all()
    for row in tuned.itertuples():
        assert answers(rows, row.start, row.defense)[0].mean() == pytest.approx(row.accuracy)
    table = pd.read_csv(tmp_path / "out" / "table.csv").set_index(["start", "defense"])
    gap = rows.set_index(["start", "defense"])["accuracy"]
    assert table.loc[("mp3", "mjp"), "difference_mean"] == pytest.approx(gap["mp3", "mjp"] - gap["mp3", "none"])
    assert table.loc[("mp3", "none"), "difference_mean"] == pytest.approx(gap["mp3", "none"] - gap["scratch", "none"])
    assert len(list((tmp_path / "pre").glob("*/model.safetensors"))) == len(STARTS) - 1


def test_the_same_images_and_weights_for_all() -> None:
    options = StartOptions()
    configs = [options.pretraining(name, 0) for name in STARTS if STARTS[name]]
    assert len({(config.data, config.model, config.seed) for config in configs}) == 1
    assert len({config.recipe.epochs * config.data.train_limit for config in configs}) == 1
    assert options.fine_tuning("mjp", 0).options.mjp.gamma == 0.1


def test_differences_are_taken_image_by_image() -> None:
    """Both lines are right on half of the images; an interval without pairs would be wider than one with them."""
    right = np.arange(400) % 2 == 0
    other = right.copy()
    other[:20] = True  # ten more
    rows = pd.DataFrame(
        {"start": start, "defense": "none", "seed": 0, "images": 400, "right": np.packbits(own).tobytes().hex()}
        for start, own in (("scratch", right), ("mp3", other))
    )
    found = comparison(rows).set_index("start").loc["mp3"]
    assert found["accuracy_mean"] == 52.5
    assert found["difference_mean"] == 2.5
    assert 1.2 < found["difference_margin"] < 1.9
    assert found["one_seed_margin"] > 4
    assert not np.isfinite(
        [found["difference_low"], found["difference_high"]]
    ).any()  # over seeds, of which there is one


def test_intervals_are_over_seeds_and_not_over_the_images_of_all_seeds() -> None:
    shares = {"scratch": [0.30, 0.33, 0.35], "mp3": [0.34, 0.36, 0.41]}
    rows = pd.DataFrame(
        {"start": start, "defense": "none", "seed": seed, "images": 1000, "right": np.packbits(right).tobytes().hex()}
        for start, values in shares.items()
        for seed, right in enumerate(np.arange(1000) < 1000 * share for share in values)
    )
    found = comparison(rows).set_index("start").loc["mp3"]
    expected = stats.ttest_rel(*(100 * np.array(shares[name]) for name in ("mp3", "scratch"))).confidence_interval()
    assert (found["difference_low"], found["difference_high"]) == pytest.approx(tuple(expected))
    assert found["seeds"] == 3


def test_rows_of_two_recipes_are_refused(tmp_path) -> None:
    assert run(tmp_path, "--starts", "scratch") == 0
    assert run(tmp_path, "--starts", "scratch", "--learning-rate", "0.001", "--resume") == 2
    with pytest.raises(UsageError, match="several recipes"):
        files(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--starts", "mae"], "--starts takes names from: scratch, supervised"),
        (["--labelled", "17"], "--labelled 17 is more than --train-limit 16"),
        (["--gamma", "2"], "must lie in [0, 1]"),
        (["--model", "resnet_micro_32"], "is for plain ViTs; resnet_micro_32"),
    ],
)
def test_errors_are_one_line(tmp_path, options, words: str, capsys) -> None:
    assert run(tmp_path, *options) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
