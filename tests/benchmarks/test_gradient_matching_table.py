"""The benchmark of gradient matching: cells, verdicts, resumption, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import gradient_matching
import matching_tuning
import pandas as pd
import pytest
from experiments.matching import protocol
from experiments.matching.options import Options
from experiments.matching.render import matching_block
from experiments.matching.table import matching_table
from experiments.matching.tuning import best_settings

from fedmjp.data import load_gallery
from fedmjp.records.rows import load_rows
from tests.conftest import interrupted_at, leave_undrawn
from tests.records.sample_rows import make_row

SMALL = [
    *("--num-images", "2", "--steps", "1", "--pictures", "1"),
    *("--attacks", "patch_embedding,inverting_gradients"),
]
CELLS = ["--batches", "1", "2", "--gammas", "0.5"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return gradient_matching.main([*SMALL, *options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


def test_writes_its_table_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole, *CELLS) == 0
    names = {p.name for p in whole.iterdir()}
    assert names >= {"rows.jsonl.gz", "table.csv", "matching.png", "reconstructions.png", "run.json"}
    rows = load_rows(whole / "rows.jsonl.gz")
    # two images by two batches: two attacks without a defence, two in two settings with it, two guesses
    assert len(rows) == 2 * 2 * (2 + 4 + 2)
    table = pd.read_csv(whole / "table.csv").set_index(["attack", "gamma", "batch_size", "setting"])
    assert table.loc[("patch_embedding", 0.0, 1, "original"), "verdict"] == "leaks"
    assert table.loc[("patch_embedding", 0.0, 2, "original"), "psnr_mean"] < 15
    assert table.loc[("inverting_gradients", 0.0, 2, "original"), "label_accuracy_mean"] == 1.0
    assert "one_mask_assumed" in table.loc[("inverting_gradients", 0.5, 2, "original"), "flags"]
    assert any("randomised_defence_once" in line for line in json.loads((whole / "run.json").read_text())["warnings"])

    with interrupted_at(protocol.Campaign, "attack", 3):
        assert run(broken, *CELLS) == 130
    assert run(broken, *CELLS) == 2
    assert "pass --resume" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        leave_undrawn(patched)
        assert run(broken, *CELLS, "--resume") == 0
    first, second = (load_rows(o / "rows.jsonl.gz").drop(columns="seconds") for o in (whole, broken))
    pd.testing.assert_frame_equal(first, second)
    assert run(broken, "--model", "vit_mini_64", "--batches", "1", "--resume") == 2
    assert "pass another --out" in capsys.readouterr().err


def test_the_verdict_is_the_common_one_over_the_best_guess_on_the_same_images() -> None:
    def rows(attack: str, values: list[float], **changes) -> list[dict]:
        common = {"setting": "original", "attack": attack, "defense_parameters": {}, "patch_recovery": 0.0, **changes}
        return [make_row(image_id=f"i{i}", psnr=v, **common) for i, v in enumerate(values)]

    mean = rows("mean_image", [10.0, 20.0, 12.0], attack_parameters={}, model="(no gradient)")
    other = rows("other_image", [9.0, 8.0, 13.5], attack_parameters={}, model="(no gradient)")
    searched = {"attack_parameters": {"steps": 5, "init": "randn"}}
    better = rows("gradvit", [11.0, 21.5, 14.0], **searched)
    exact = rows("dlg", [60.0, 19.0, 13.0], **searched)
    worse = rows("idlg", [9.0, 19.0, 12.5], **searched)  # above the mean image on one, never above both guesses
    unlike = rows("april_optimisation", [9.0, 19.0, 12.5], diagnosis="no such block", **searched)
    table = matching_table(pd.DataFrame(mean + other + better + exact + worse + unlike)).set_index("attack")
    assert table.loc["gradvit", "gain_mean"] == pytest.approx(3.0 / 3)
    answers = ["partly", "leaks", "no leak shown", "not tested"]
    assert list(table.loc[["gradvit", "dlg", "idlg", "april_optimisation"], "verdict"]) == answers
    assert table.loc["mean_image", "verdict"] == table.loc["other_image", "verdict"] == ""


MISTAKES = [
    (["--attacks", "dgl"], "did you mean 'dlg'"),
    (["--init", "patch"], "unknown init 'patch'"),
    (["--init", "patch_embedding", "--restarts", "2"], "use restarts=1 instead of 2"),
    (["--batches", "4"], "--batches 4 needs at least as many --num-images"),
    (["--steps", "0"], "--steps takes numbers of at least 1"),
    (["--gammas", "1.5"], "--gamma must lie in"),
    (["--model", "vit_nano"], "unknown model"),
    (["--attacks", "auto"], "--attacks auto keeps to a time, which --steps sets here"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", "--batches", "1", *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]


@pytest.mark.usefixtures("undrawn")
def test_another_defence_stands_beside_none(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--batches", "1", "--num-images", "1", "--pictures", "0", "--attacks", "patch_embedding"]
    assert run(out, *options, "--defense", "noise", "--noise-multiplier", "0.01") == 0
    table = pd.read_csv(out / "table.csv").set_index(["attack", "defense", "setting"])["psnr_mean"]
    assert table["patch_embedding", "none", "original"] > 60
    assert table["patch_embedding", "noise", "original"] < 30
    heads = matching_block(out).splitlines()[0]
    assert heads == "| attack | steps | batch of 1 | noise |"


@pytest.mark.long
def test_settings_are_tuned_one_after_the_other_on_images_that_are_not_scored(tmp_path, capsys) -> None:
    arguments = ["--scored", "3", "--num-images", "2", "--steps", "2", "--out", str(tmp_path / "out")]
    grid = ["--grid", "inverting_gradients.rate=0.1+0.01", "inverting_gradients.tv=0.2+20"]
    assert matching_tuning.main([*arguments, *grid]) == 0
    rows = load_rows(tmp_path / "out" / "rows.jsonl.gz")
    scored = load_gallery("photos", size=32, limit=3).images.ids
    assert set(rows["image_id"]).isdisjoint(scored)
    assert len(rows) == 2 * 3  # two images; the best rate meets the first weight twice, computed once
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert list(table["settings"])[:2] == ["rate 0.1, tv 0.2", "rate 0.01, tv 0.2"]
    best = table.loc[table["highest"], "settings"].item().split()
    chosen = f"inverting_gradients.rate={best[1].rstrip(',')},inverting_gradients.tv={best[3]}"
    assert f"--attack-options {chosen}" in capsys.readouterr().out
    before = (tmp_path / "out" / "rows.jsonl.gz").read_bytes()
    assert matching_tuning.main([*arguments, *grid, "--resume"]) == 0
    assert (tmp_path / "out" / "rows.jsonl.gz").read_bytes() == before


def test_the_best_value_of_a_setting_is_kept_for_the_next() -> None:
    asked = []

    def mean_psnr(name: str, settings: dict[str, str]) -> float:
        asked.append(settings)
        return {"a": 1.0, "b": 3.0, "c": 2.0}[settings["x"]] + (settings.get("y") == "q")

    assert best_settings("dlg", {"x": ("a", "b", "c"), "y": ("p", "q")}, mean_psnr) == {"x": "b", "y": "q"}
    assert asked == [{"x": "a"}, {"x": "b"}, {"x": "c"}, {"x": "b", "y": "p"}, {"x": "b", "y": "q"}]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--grid", "dlg"], "--grid takes ATTACK.setting=value, not 'dlg'"),
        (["--grid", "patch_embedding.prior.strength=1"], "patch_embedding does not search"),
        (["--grid", "dlg.rate=fast"], "rate of attack 'dlg' takes"),
        (["--scored", "95", "--num-images", "2"], "holds 96 images: too few for 95 that are scored and 2 others"),
        (["--grid"], "--grid needs at least one"),
    ],
)
def test_mistakes_in_a_tuning_are_answered_in_one_line(arguments, complaint: str, tmp_path, capsys) -> None:
    assert matching_tuning.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_attacks_take_settings(capsys) -> None:
    options = Options(attacks=("gradvit", "dlg"), attack_options=("gradvit.rate=0.01,gradvit.steps=7",))
    built = options.build_attacks(5)
    assert (built["gradvit"].rate, built["gradvit"].steps, built["dlg"].steps) == (0.01, 7, 5)
