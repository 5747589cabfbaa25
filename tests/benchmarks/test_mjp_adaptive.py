"""The benchmark of the attacks that know MJP: curves, resumption, mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import mjp_adaptive
import pandas as pd
import pytest
import torch
from experiments.adaptive import protocol, updates
from experiments.adaptive.render import mask_block
from experiments.adaptive.table import adaptive_tables, time_table
from experiments.rendering import spread_table
from experiments.session import failures
from rich.console import Console
from safetensors.torch import save_file
from torch.nn import functional as F

from attacks import ATTACKS, Capability
from attacks.base import FAILED
from attacks.observation import ORDER_GUESSED
from fedmjp.audit.victims import drifted
from fedmjp.metrics import bootstrap_mean, psnr
from fedmjp.models import build_model
from fedmjp.records.rows import load_rows
from tests.conftest import interrupted_at

SMALL = [
    "--model",
    "vit_mini_64",
    "--num-images",
    "2",
    "--gammas",
    "0.1",
    "--update-gammas",
    "0.1",
    "--batch-size",
    "1",
]
# What is asked of `unmix` here is a row; tests/attacks/mjp/test_unmix.py asks for the image.
BRIEF = ["unmix.search.rounds=1", "unmix.search.steps=5", "unmix.sweep.rounds=0", "unmix.placement.restarts=0"]
NAMED = ["--attacks", "april", "patch_embedding", "mjp_subspace", "--update-attacks", "mjp_rounds"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line with the attacks of the committed table, in this process."""
    try:
        return mjp_adaptive.main([*SMALL, *NAMED, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(autouse=True)
def brief_pictures(undrawn, monkeypatch) -> None:
    """For all runs but that of `finished`: pictures take as long as rows."""
    monkeypatch.setattr(protocol, "PICTURED", 1)
    monkeypatch.setattr(protocol, "PICTURED_UPDATES", (1,))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("adaptive") / "out"
    assert run(out) == 0
    return out


def test_writes_tables_figures_and_provenance(finished) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names >= {"rows.jsonl.gz", "one_update.csv", "updates.csv", "leakage.png", "round_by_round.png", "run.json"}
    rows = load_rows(finished / "rows.jsonl.gz")
    # two images: three attacks and the rounds' first update, then four more points a schedule, and its first once more
    assert len(rows) == 2 * (3 + 5 + 5)
    assert json.loads((finished / "run.json").read_text())["rows"] == len(rows)
    assert rows["details"].map(lambda d: d["psnr_visible"]).notna().all()
    assert set(rows.loc[rows["block"] == "april", "attack"]) == {"april"}


def test_the_errors_of_visible_and_masked_patches_add_up() -> None:
    original, image = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, False, True, False, False, False, False, True])
    found = updates.psnr_by_mask(image[None], original, mask, 4)
    repaired = image.clone()
    for place in (~mask).nonzero()[:, 0].tolist():
        y, x = divmod(place, 3)
        repaired[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = original[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
    assert found["psnr_visible_exact"] == pytest.approx(float(psnr(repaired[None], original[None])))
    whole, visible, exact = (
        10 ** (-float(value) / 10) for value in (psnr(image[None], original[None]), *found.values())
    )
    assert whole == pytest.approx(visible * 6 / 9 + exact)
    assert math.isnan(updates.psnr_by_mask(image[None], original, ~mask | mask, 4)["psnr_visible"])
    assert math.isnan(updates.psnr_by_mask(image[None], original, mask & ~mask, 4)["psnr_visible_exact"])


def test_a_figure_that_some_rows_of_a_line_lack_is_left_out(finished) -> None:
    rows = load_rows(finished / "rows.jsonl.gz")
    without = {name: value for name, value in rows["details"][0].items() if name != "psnr_visible_exact"}
    rows["details"] = [without, *rows["details"][1:]]
    table = adaptive_tables(rows)[0].set_index("attack")["psnr_visible_exact_median"]
    assert table.isna().sum() == 1
    assert math.isnan(table[rows["attack"][0]])


def test_answers_in_time_are_counted(finished) -> None:
    rows = load_rows(finished / "rows.jsonl.gz")
    rows = rows[(rows["attack"] == "mjp_subspace") & (rows["round"] == 1)].assign(seconds=[5.0, 6.0])
    line = time_table(rows, 5.0).squeeze()
    assert (line["attack"], line["count"], line["in_time"]) == ("mjp_subspace", 2, 1)
    assert (line["seconds_median"], line["seconds_max"]) == (5.5, 6.0)


def test_resumption_refuses_other_pictures(finished, tmp_path, capsys) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    digests = (out / "images.sha256").read_text()
    (out / "images.sha256").write_text("0" * 64 + digests[64:])  # the digest of another picture
    assert run(out, "--resume") == 2
    assert "is not the one that" in capsys.readouterr().err


def test_knowing_the_defence_helps_and_more_updates_help_more(finished) -> None:
    one = pd.read_csv(finished / "one_update.csv").set_index("attack")
    assert one.loc["mjp_subspace", "psnr_median"] > one.loc["patch_embedding", "psnr_median"] + 3
    assert one.loc["mjp_subspace", "psnr_median"] > one.loc["april", "psnr_median"] + 3
    updates = pd.read_csv(finished / "updates.csv").set_index(["setting", "updates"])["psnr_median"]
    assert updates["paper", 6] > 60
    assert updates["paper", 6] > updates["paper", 1] + 20


@pytest.mark.long
def test_an_interrupted_run_is_finished_with_the_same_rows(finished, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    with interrupted_at(updates, "score_found", 5):
        assert run(out) == 130
    assert run(out) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run(out, "--resume") == 0
    first, second = (load_rows(o / "rows.jsonl.gz").drop(columns="seconds") for o in (finished, out))
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.long
def test_two_workers_write_the_rows_of_one_process(finished, tmp_path) -> None:
    assert run(tmp_path / "out", "--workers", "2") == 0
    serial, spread = (load_rows(o / "rows.jsonl.gz").drop(columns="seconds") for o in (finished, tmp_path / "out"))
    pd.testing.assert_frame_equal(spread, serial)


def test_weights_move_and_stay_reproducible(tmp_path) -> None:
    options = mjp_adaptive.Options(model="vit_mini_64", num_images=1, out=tmp_path / "out")
    bench = protocol.Run(options, Console(quiet=True))
    sent = bench.subjects["standard"].built
    once, again = (drifted(sent, options.drift, 0, 2).module.state_dict() for _ in range(2))
    for name, tensor in sent.module.state_dict().items():
        assert torch.equal(once[name], again[name])
        if tensor.abs().sum() > 0:
            assert float((once[name] - tensor).norm() / tensor.norm()) == pytest.approx(options.drift, rel=0.5)


def test_auto_is_the_default_and_takes_what_the_updates_expose(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--model", "vit_mini_32", "--num-images", "1", "--gammas", "0.5", "--update-gammas", "0.5"]
    options += ["--updates", "1", "2", "--schedules", "paper", "--attack-options", *BRIEF]
    assert mjp_adaptive.main([*options, "--out", str(out)]) == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert set(zip(rows["attack"], rows["block"], rows["round"], strict=True)) == {
        *(("april", "april", 1), ("patch_embedding", "standard", 1), ("mjp_subspace", "standard", 1)),
        ("unmix", "standard", 1),
        *(("mjp_rounds", "standard", 1), ("mjp_rounds", "standard", 2)),  # asked for by name beside auto
    }
    reasons = json.loads((out / "run.json").read_text())["not_run"]
    assert set(reasons) == set(ATTACKS) - set(rows["attack"])
    assert "beyond the budget of 10 s an update" in reasons["dlg"]
    assert "one image" in reasons["batch_rounds"]


def test_attacks_over_updates_are_chosen_where_the_last_update_of_a_client_is_not_masked(tmp_path) -> None:
    """Under the released schedule half the updates are not: others' updates decide."""
    bench = protocol.Run(
        mjp_adaptive.Options(model="vit_mini_64", num_images=8, gammas=(), update_gammas=(0.1,), out=tmp_path / "out"),
        Console(quiet=True),
    )
    paper, released = protocol.cases(dataclasses.replace(bench.options, updates=(2,), update_attacks=("auto",)))
    for case in (paper, released):
        plan = bench.plan(case, bench.session.victims(bench.gallery, case.defense, 0))
        assert set(plan) == {2}
        assert set(plan[2]) == {"mjp_rounds", "unmix_rounds"}


def test_masks_as_released_a_warm_up_and_a_resampled_model_are_named(tmp_path) -> None:
    """Of 36 patches the first update hides none (warm-up), the second at most the floor of half."""
    out = tmp_path / "out"
    options = ["--model", "vit_mini_64", "--image-size", "48", "--num-images", "1", "--gammas", "--update-gammas"]
    options += ["0.5", "--updates", "1", "2", "--update-attacks", "mjp_rounds", "--schedules", "paper"]
    options += ["--mask-sampler", "released", "--jigsaw-warmup", "1", "--out", str(out)]
    assert mjp_adaptive.main(options) == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert set(rows["model"]) == {"vit_mini_64_mjp, 48 px"}
    first, second = (d["masked"] for d in rows.sort_values("round")["details"])
    assert first == 0 < second <= 18
    updates = pd.read_csv(out / "updates.csv")
    assert set(updates["setting"]) == {"paper, released masks, warm-up 1"}
    assert updates["psnr_median"].min() > 60


def test_weights_that_were_trained_at_the_asked_size_are_attacked(tmp_path) -> None:
    built = build_model("vit_micro8_32_mjp", num_classes=5, weights="random", image_size=48, seed=3)
    save_file(built.module.state_dict(), tmp_path / "trained.safetensors")
    options = ["--model", "vit_micro8_32", "--weights", str(tmp_path / "trained.safetensors"), "--image-size", "48"]
    options += ["--num-images", "1", "--gammas", "0.1", "--attacks", "patch_embedding", "--update-gammas"]
    assert mjp_adaptive.main([*options, "--out", str(tmp_path / "out")]) == 0
    (row,) = load_rows(tmp_path / "out" / "rows.jsonl.gz").query("attack == 'patch_embedding'").to_dict("records")
    assert row["model"] == "vit_micro8_32_mjp, 48 px"
    assert row["weights"].startswith("trained.safetensors")
    assert "resized" not in row["weights"]


@pytest.mark.long
def test_all_runs_every_attack_in_the_experiment_that_it_reads(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--model", "vit_micro8_32", "--num-images", "1", "--gammas", "0.1", "--update-gammas", "0.1"]
    options += ["--updates", "2", "--schedules", "paper", "--attacks", "all", "--update-attacks", "all", "--steps", "1"]
    options += ["--attack-options", *BRIEF, *(option.replace("unmix", "unmix_rounds") for option in BRIEF)]
    assert mjp_adaptive.main([*options, "--out", str(out)]) == 0
    rows = load_rows(out / "rows.jsonl.gz")
    needs = {name: ATTACKS.get(name).needs for name in ATTACKS}
    over = {
        n for n, own in needs.items() if Capability.SEVERAL_ROUNDS in own and Capability.ACTIVE_PARAMETERS not in own
    }
    assert set(rows.loc[rows["round"] == 2, "attack"]) == over
    assert set(rows.loc[rows["round"] == 1, "attack"]) >= {"dlg", "unmix", "patch_embedding", "april"}
    assert set(rows["attack"]) | set(json.loads((out / "run.json").read_text())["not_run"]) == set(ATTACKS)


def test_choices_of_masks_are_compared(tmp_path) -> None:
    out = tmp_path / "out"
    options = [*SMALL, "--num-images", "1", "--gammas", "--update-gammas", "0.2", "--updates", "1", "3"]
    options += ["--update-attacks", "mjp_rounds", "--schedules", "paper", "--mask-choices", "block", "fixed"]
    assert mjp_adaptive.main([*options, "--out", str(out)]) == 0
    table = pd.read_csv(out / "table.csv").set_index(["mask_choice", "updates"])["psnr_mean"]
    assert table["block", 3] > table["block", 1] + 10
    assert table["fixed", 3] < table["fixed", 1] + 1
    assert "| 0.2 | `mjp_rounds` | 3 |" in mask_block(out)


def test_one_update_is_pictured_at_the_ratio_that_is_asked_for(tmp_path, monkeypatch) -> None:
    drawn: dict[str, list] = {}
    monkeypatch.setattr(protocol, "reconstructions_figure", lambda panels, path: drawn.update({path.name: panels}))
    options = ["--model", "vit_mini_64", "--weights", "auto", "--num-images", "1", "--gammas", "0.1", "--update-gammas"]
    options += ["--attacks", "april", "patch_embedding", "mjp_subspace", "--pictured-gamma", "0.1"]
    assert mjp_adaptive.main([*options, "--out", str(tmp_path)]) == 0
    (panel,) = drawn["one_update.png"]
    assert list(panel.reconstructions) == ["patch_embedding", "mjp_subspace"]  # april has a block of its own
    patches = [F.unfold(image[None], 8, stride=8)[0].T for image in (panel.original, panel.seen)]  # (64, 192) each
    moved = (patches[0] != patches[1]).any(dim=1)
    assert 0 < moved.sum() <= 6  # of 64
    torch.testing.assert_close(*(own[moved].sort(dim=0).values for own in patches))
    best = panel.reconstructions["mjp_subspace"]
    assert best.psnr == pytest.approx(float(psnr(best.image[None], panel.original[None])))
    assert best.psnr > panel.reconstructions["patch_embedding"].psnr + 3


def test_patches_are_counted_in_any_order_where_the_order_is_a_guess() -> None:
    """unmix places a third of four fifths of them; one answer of it left nothing to place."""
    given = [("unmix", [ORDER_GUESSED], 0.25, 0.8), ("unmix", [ORDER_GUESSED], 0.35, 0.9), ("unmix", [], 1.0, 1.0)]
    given += [("mjp_subspace", [], 0.1, 0.4)]
    rows = pd.DataFrame(
        [
            {"attack": attack, "flags": flags, "patch_recovery": placed, "any_place": found, "image_id": str(number)}
            for number, (attack, flags, placed, found) in enumerate(given)
        ]
    )
    rows = rows.assign(defense_parameters=[{"gamma": 0.9}] * 4, details=[{}] * 4, setting="paper", psnr=20.0)
    one, _ = adaptive_tables(rows.assign(round=1, seed=0, seconds=1.0, image=0))
    one = one.set_index("attack")
    assert one.loc["unmix", ["patch_recovery_median", "patches_any_order_median"]].tolist() == [0.35, 0.9]
    assert one.loc["mjp_subspace", "patch_recovery_median"] == 0.1
    assert math.isnan(one.loc["mjp_subspace", "patches_any_order_median"])


MISTAKES = [
    (["--pictured-gamma", "1.5"], "--gamma must lie in"),
    (["--gammas", "--update-gammas"], "there is nothing to attack"),
    (["--attacks", "subspace"], "unknown attack 'subspace'"),
    (["--gammas", "1.5"], "--gamma must lie in"),
    (["--num-images", "0"], "must be at least 1"),
    (["--images", "no/such/folder"], "neither a folder nor a data set"),
    (["--schedules", "none"], "invalid choice"),
    (["--mask-choices", "block", "--mask-choice", "random"], "takes --mask-choices, a run for each value"),
    (["--mask-choices", "random", "--mask-sampler", "released"], "--mask-sampler released draws blocks"),
    (["--mask-choices", "fixed", "--defense", "noise"], "--defense noise has no option mask_choice"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]


@pytest.mark.parametrize("left_out", [pytest.param("--gammas", marks=pytest.mark.long), "--update-gammas"])
def test_either_experiment_can_be_left_out(tmp_path, left_out: str) -> None:
    out = tmp_path / "out"
    assert run(out, left_out) == 0
    names = {p.name for p in out.iterdir()}
    assert ("one_update.csv" in names) == (left_out == "--update-gammas")
    assert ("updates.csv" in names) == (left_out == "--gammas")


def test_a_defence_without_a_masking_ratio_is_attacked_once(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--model", "vit_mini_64", "--num-images", "1", "--defense", "noise", "--noise-multiplier", "0"]
    options += ["--clip-norm", "1000", "--updates", "1", "2", "--attacks", "patch_embedding"]
    options += ["--update-attacks", "mjp_rounds"]
    assert mjp_adaptive.main([*options, "--out", str(out)]) == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert set(zip(rows["attack"], rows["round"], rows["setting"], strict=True)) == {
        *(("patch_embedding", 1, "paper"), ("mjp_rounds", 1, "paper"), ("mjp_rounds", 2, "paper")),
    }
    assert set(rows["model"]) == {"vit_mini_64"}
    assert pd.read_csv(out / "one_update.csv")["psnr_median"].min() > 60  # a multiplier of 0 hides nothing
    assert set(pd.read_csv(out / "updates.csv")["gamma"]) == {0}


def test_several_seeds_of_one_image_count_as_one_image() -> None:
    """The interval is that of the images' means over seeds, not of three times as many images."""
    psnr = {"a": (10.0, 20.0, 30.0), "b": (40.0, 60.0, 80.0), "c": (100.0, 110.0, 120.0)}
    rows = pd.DataFrame(
        [
            {"attack": "unmix", "image_id": image, "image": 0, "seed": seed, "psnr": value, "seconds": 1.0}
            for image, values in psnr.items()
            for seed, value in enumerate(values)
        ]
    )
    line = spread_table(rows, ["attack"]).iloc[0]
    expected = bootstrap_mean([20.0, 60.0, 110.0])
    assert (line["count"], line["seeds"]) == (3, 3)
    assert (line["psnr_mean"], line["psnr_low"], line["psnr_high"]) == pytest.approx(expected[:3])
    assert line["psnr_median"] == 60.0
    assert line["psnr_share_recognisable"] == pytest.approx(7 / 9)


def test_attacks_that_raised_are_named() -> None:
    said = [("unmix", f"{FAILED}: IndexError: index 0"), ("unmix", None), ("april", "no positions"), ("dlg", "")]
    rows = pd.DataFrame(said, columns=["attack", "diagnosis"])
    assert failures(rows) == [f"unmix failed in 1 of its 2 rows, which show nothing: {FAILED}: IndexError: index 0"]
    assert failures(rows[1:]) == []


def test_a_run_says_which_attacks_raised(tmp_path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no pivot")

    monkeypatch.setattr(ATTACKS.get("mjp_subspace"), "reconstruct", fail)
    given = [
        "--model",
        "vit_mini_32",
        "--num-images",
        "1",
        "--gammas",
        "0.5",
        "--update-gammas",
        "--out",
        str(tmp_path),
    ]
    assert mjp_adaptive.main([*given, "--attacks", "mjp_subspace", "--schedules", "paper"]) == 0
    assert "mjp_subspace failed in 1 of its 1 rows" in " ".join(capsys.readouterr().out.split())
