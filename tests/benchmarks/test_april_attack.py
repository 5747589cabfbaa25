"""The leakage benchmark as a user meets it: a whole run, mistakes, interrupts, half-written rows."""

from __future__ import annotations

import json
from pathlib import Path

import april_attack
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attacks import ATTACKS
from fedmjp.audit import campaign as campaign_module
from fedmjp.records.rows import load_rows
from tests.conftest import interrupted_at, leave_undrawn

pytestmark = pytest.mark.usefixtures("undrawn")  # but for the fixture `finished`

SMALL = ["--num-images", "4", "--batch-size", "3"]
MODELS = ["--model", "vit_mini_64", "vit_mini_64_nope", "vit_mini_64_mjp", "--weights", "random"]
# What is asked of `unmix` here is a row; tests/attacks/mjp/test_unmix.py asks for the image.
BRIEF = ["unmix.search.rounds=1", "unmix.search.steps=5", "unmix.sweep.rounds=0", "unmix.placement.restarts=0"]
WHOLE = [*MODELS, "--attack-options", *BRIEF]
QUICK = ["--model", "vit_mini_64_mjp", "--weights", "random", "--attacks", "april", "patch_embedding", "mjp_subspace"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return april_attack.main([*SMALL, "--out", str(out), *options])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


def rows_of(out: Path) -> pd.DataFrame:
    return load_rows(out / "rows.jsonl.gz").drop(columns="seconds")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("table") / "out"
    assert run(out, *WHOLE) == 0
    return out


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    """One model on two blocks: six passes, those after it draw figures."""
    out = tmp_path_factory.mktemp("quick") / "out"
    with pytest.MonkeyPatch.context() as patched:
        leave_undrawn(patched)
        assert run(out, *QUICK) == 0
    return out


def test_writes_tables_figures_and_provenance(finished) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names >= {
        *("rows.jsonl.gz", "table.csv", "condition.png", "run.json"),
        *("table_april.tex", "table_april.md", "table_standard.tex", "table_standard.md"),
        *(f"reconstructions_{block}_{setting}.png" for block in ("april", "standard") for setting in "ab"),
    }
    record = json.loads((finished / "run.json").read_text())
    assert record["rows"] == len(rows_of(finished))
    assert record["weights"][-1][1] == "random (seed 0), NOT TRAINED"


def test_the_table_holds_every_line_it_should(finished) -> None:
    table = pd.read_csv(finished / "table.csv")
    # settings: 3 of the plain model, 3 twice without positions (as sent, token gradient granted), 4 under MJP
    counts = table["attack"].value_counts()
    assert counts["patch_embedding"] == 2 * (3 + 6 + 4)
    assert counts["april"] == 3 + 6 + 4  # on the block for which its equation holds
    assert counts["mjp_subspace"] == 2 * 2  # where positions are hidden: (b) and (d) under MJP
    assert counts["unmix"] == counts["mjp_subspace"]
    assert counts.sum() == 26 + 13 + 4 + 4 + 2
    assert table["weights"].dropna().eq("random, NOT TRAINED").all()
    silent = table[(table["line"] == "vit_mini_64_nope")]
    assert (silent["failed"] == silent["count"]).all()
    assert silent["diagnosis"].str.contains("no learnable position embedding").all()


def test_the_closed_form_and_what_mjp_does_to_it(finished) -> None:
    table = pd.read_csv(finished / "table.csv").set_index(["block", "attack", "setting", "line"])["psnr_mean"]
    assert table["standard", "patch_embedding", "a", "vit_mini_64"] > 60
    assert table["standard", "patch_embedding", "b", "vit_mini_64_mjp"] < 15
    assert table["standard", "patch_embedding", "c", "vit_mini_64_mjp"] > 60
    assert table["standard", "patch_embedding", "a", "vit_mini_64_nope (token_gradient)"] > 60


@pytest.mark.long  # what a crash leaves: tests/test_crash.py
def test_an_interrupt_and_a_half_written_row_lose_nothing(quick, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    with interrupted_at(campaign_module, "run_attacks", 2):
        assert run(out, *QUICK) == 130
    assert "go on with --resume" in capsys.readouterr().err
    rows = out / "rows.jsonl"
    kept = rows.read_bytes().splitlines(keepends=True)
    if kept:
        rows.write_bytes(b"".join(kept[:-1]) + kept[-1][:50])
    assert run(out, *QUICK) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run(out, *QUICK, "--resume") == 0
    pd.testing.assert_frame_equal(rows_of(quick), rows_of(out))


def test_resume_adds_a_model_to_a_finished_table(finished, tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--model", "vit_mini_64", "--attacks", "patch_embedding", "--block", "standard") == 0
    before = rows_of(out)
    assert run(out, "--model", "vit_mini_32", "--attacks", "patch_embedding", "--block", "standard", "--resume") == 0
    after = rows_of(out)
    assert set(after["model"]) == {"vit_mini_64", "vit_mini_32", "(no gradient)"}
    pd.testing.assert_frame_equal(after[: len(before)], before)
    assert len(json.loads((out / "run.json").read_text())["commands"]) == 2


def test_auto_is_the_default_and_says_what_it_left_out(finished) -> None:
    assert april_attack.Options().attacks == ("auto",)
    reasons = json.loads((finished / "run.json").read_text())["not_run"]
    assert set(reasons) == set(ATTACKS) - {"april", "patch_embedding", "mjp_subspace", "unmix"}
    assert "beyond the budget of 10 s an update" in reasons["dlg"]
    assert "only one update" in reasons["mjp_rounds"]


@pytest.mark.long  # tests/benchmarks/test_mjp_adaptive.py asks for all attacks, too
def test_all_runs_every_attack(tmp_path) -> None:
    out = tmp_path / "out"
    small = ["--model", "vit_micro8_32_mjp", "--block", "standard", "--num-images", "1", "--steps", "1"]
    assert run(out, *small, "--attacks", "all", "--attack-options", *BRIEF) == 0
    rows = rows_of(out)
    ran = set(rows["attack"])
    reasons = json.loads((out / "run.json").read_text())["not_run"]
    assert ran | set(reasons) == {*ATTACKS, "mean_image", "other_image"}
    assert ran >= {"dlg", "unmix", "mjp_rounds", "batch_rounds", "inverting_gradients"}
    searched = rows[rows["attack"] == "dlg"]["attack_parameters"]
    assert {parameters["steps"] for parameters in searched} == {1}


MISTAKES = [
    (["--model", "vit_x"], "unknown model 'vit_x'"),
    (["--attacks", "aprill"], "did you mean 'april'"),
    (["--images", "no/such/folder"], "neither a folder nor a data set"),
    (["--weights", "vit_mini_64=no.safetensors", "--model", "vit_mini_64"], "no checkpoint at no.safetensors"),
    (["--gamma", "1.5"], "--gamma must lie in"),
    (["--batch-size", "0"], "--batch-size must be at least 1"),
    (["--grants", "model_weights", "--attacks", "april"], "needs position_gradient"),
    (["--budget", "soon"], "--budget takes a time such as 10s"),
    (["--attacks"], "--attacks takes auto, all, or names"),
    (["--device", "cuda:99"], "--device cuda:99 cannot be used"),
    (["--block", "post"], "invalid choice"),
    (["--seeds"], "--seeds and --block each need"),
    (["--lpips-weights", "no.pt"], "no LPIPS weights at no.pt"),
    (["--model", "resnet50", "--block", "april"], "needs a plain ViT"),
]


def test_a_model_without_tokens_to_attack_has_rows_that_say_so(tmp_path) -> None:
    out = tmp_path / "out"
    assert run(out, "--model", "swin_t", "--block", "standard", "--num-images", "1") == 0
    found = rows_of(out)
    found = found[found["model"] == "swin_t"]
    assert found["psnr"].isna().all()
    assert found["diagnosis"].str.contains("no learnable position embedding").all()
    assert not (out / "reconstructions_standard_a.png").exists()


def test_a_folder_of_which_nothing_can_be_read(tmp_path, capsys) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "cut.jpg")
    whole = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    assert run(tmp_path / "out", "--model", "vit_mini_64", "--images", str(folder)) == 2
    printed = capsys.readouterr()
    assert "left out: cannot decode image 'cut.jpg'" in printed.out
    assert "can be read; nothing was attacked" in printed.err


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_code_2(tmp_path, capsys, options: list[str], words: str) -> None:
    options = options if "--model" in options else [*options, "--model", "vit_mini_64"]
    assert run(tmp_path / "out", *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]


@pytest.mark.long
def test_commas_part_words_as_blanks_do(tmp_path) -> None:
    out = tmp_path / "out"
    assert (
        run(out, "--model", "vit_mini_32,vit_mini_64", "--attacks", "april,patch_embedding", "--block", "standard") == 0
    )
    assert set(rows_of(out)["attack"]) == {"april", "patch_embedding", "mean_image", "other_image"}


def test_help_teaches(capsys) -> None:
    assert run(Path("x"), "--help") == 0
    printed = capsys.readouterr().out
    assert "--resume" in printed
    assert "token_gradient" in printed


def test_another_defence_acts_on_the_update_in_the_settings_that_are_defended(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--model", "vit_mini_64", "--weights", "random", "--block", "standard", "--attacks", "patch_embedding"]
    assert run(out, *options, "--defense", "noise", "--noise-multiplier", "0.01", "--clip-norm", "30") == 0
    rows = rows_of(out)
    attacked = rows[rows["attack"] == "patch_embedding"]
    assert set(rows["defense"]) == {"noise"}
    assert attacked["defense_parameters"].iloc[0] == {"clip_norm": 30, "noise_multiplier": 0.01}
    by = attacked.groupby("setting")["psnr"]
    assert by.min()["a"] > 60
    assert by.max()["b"] < 30
    assert by.max()["d"] < 30


@pytest.fixture
def one_model(tmp_path) -> Path:
    """Rows of three pictures of a folder under one defence, on the smallest model."""
    root = tmp_path / "pictures"
    root.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{index}.png")
    assert april_attack.main(list(tiny(root, tmp_path / "out"))) == 0
    return tmp_path


def tiny(root: Path, out: Path, *options: str) -> tuple[str, ...]:
    given = ("--model", "vit_micro_32", "--weights", "random", "--block", "standard", "--attacks", "patch_embedding")
    return (*given, "--defense", "noise", "--images", str(root), "--out", str(out), *options)


def test_resumption_refuses_other_options_and_other_pictures_and_changes_nothing(one_model, capsys) -> None:
    root, out = one_model / "pictures", one_model / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert json.loads(before["run.json"])["finished"] is True
    assert april_attack.main(list(tiny(root, out, "--resume", "--noise-multiplier", "0.5"))) == 2
    error = capsys.readouterr().err.strip()
    assert "holds rows of noise with noise_multiplier 0.001, not 0.5; resume with the same options" in error
    assert error.count("\n") == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    Image.new("RGB", (32, 32)).save(root / "1.png")
    assert april_attack.main(list(tiny(root, out, "--resume"))) == 2
    error = capsys.readouterr().err.strip()
    assert "image '1.png' of folder:pictures is not the one that" in error
    assert (out / "rows.jsonl.gz").read_bytes() == before["rows.jsonl.gz"]
