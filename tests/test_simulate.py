"""The command line as a user meets it: whole runs, mistakes, interrupts, resumption."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from attacks.closed_form.april import April
from fedmjp import simulate
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig, from_flat, option_places
from tests.conftest import interrupted_at

SMALL = ["--model", "vit_mini_32", "--weights", "random", "--clients", "3", "--rounds", "2"]
SMALL += ["--audit-clients", "0", "1", "--test-limit", "8"]


def run(out, *options: str) -> int:
    """Exit code of the command line, in this process; with two attacks unless others are asked for."""
    attacks = [] if "--attacks" in options else ["--attacks", "patch_embedding", "april"]
    try:
        return simulate.main([*SMALL, *attacks, "--out", str(out), *options])
    except SystemExit as stop:  # the parser of the command line leaves this way
        return int(stop.code)


def rows_of(out) -> list[dict]:
    """Rows without what may differ between equal runs."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that compares two defences."""
    out = tmp_path_factory.mktemp("run") / "out"
    assert run(out, "--defense", "none", "mjp") == 0
    return out


def test_writes_everything_the_report_promises(finished) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names >= {
        *("rows.jsonl", "summary.csv", "summary.tex", "rounds.csv", "run.json", "report.html"),
        *("reconstructions.png", "leakage_by_round.png", "training.png", "images"),
    }
    assert "state" not in names
    rows = rows_of(finished)
    assert len(rows) == 2 * 2 * 2 * 4  # defences x rounds x audited clients x (attacks + baselines)
    assert {r["attack"] for r in rows} == {"mean_image", "other_image", "patch_embedding", "april"}
    assert all(r["commit"] and r["weights"] == "random (seed 0), NOT TRAINED" for r in rows)
    rounds = pd.read_csv(finished / "rounds.csv")
    assert rounds.groupby("defense")["round"].apply(list).to_dict() == {"none": [0, 1, 2], "mjp": [0, 1, 2]}
    record = json.loads((finished / "run.json").read_text())
    assert record["finished"]
    assert record["versions"]["torch"]


def test_the_open_federation_leaks_and_mjp_stops_the_closed_forms(finished) -> None:
    rows = pd.DataFrame(rows_of(finished))
    mean = rows.groupby(["defense", "attack"])["psnr"].mean()
    assert mean["none", "patch_embedding"] > 60
    assert mean["mjp", "patch_embedding"] < 15
    assert mean["mjp", "april"] < 15


def test_defences_meet_the_same_images(finished) -> None:
    rows = pd.DataFrame(rows_of(finished))
    ids = [list(group["image_id"]) for _, group in rows.groupby("defense")]
    assert ids[0] == ids[1]


@pytest.mark.usefixtures("undrawn")
def test_same_command_same_rows(finished, tmp_path) -> None:
    assert run(tmp_path / "again", "--defense", "none", "mjp") == 0
    assert rows_of(tmp_path / "again") == rows_of(finished)


def test_finished_run_can_be_rendered_again(finished) -> None:
    before = rows_of(finished)
    (finished / "report.html").unlink()
    (finished / "state").mkdir()  # as a crash leaves it between the mark of a finished run and the end
    assert run(finished, "--defense", "none", "mjp", "--resume") == 0
    assert not (finished / "state").exists()
    assert (finished / "report.html").exists()
    assert rows_of(finished) == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("stop_at", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 9))])
def test_interrupted_run_resumes_without_repeating(finished, tmp_path, stop_at: int) -> None:
    out = tmp_path / "run"
    with interrupted_at(ClientTask, "update", stop_at):
        assert run(out, "--defense", "none", "mjp") == 130
    before = (out / "rows.jsonl").read_text().splitlines()
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"run_id": "half a li')
    assert run(out, "--defense", "none", "mjp", "--resume") == 0
    assert (out / "rows.jsonl").read_text().splitlines()[: len(before)] == before
    assert rows_of(out) == rows_of(finished)


@pytest.mark.usefixtures("undrawn")
def test_failed_client_is_named_and_its_run_resumes(tmp_path, monkeypatch, capsys) -> None:
    honest = ClientTask.update

    def update(self, client, number, *state):
        if (client, number) == (2, 2):
            raise RuntimeError("out of disk")
        return honest(self, client, number, *state)

    monkeypatch.setattr(ClientTask, "update", update)
    assert run(tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert "round 2: client 2 failed: RuntimeError: out of disk" in error
    assert "--resume" in error
    monkeypatch.setattr(ClientTask, "update", honest)
    assert run(tmp_path / "run", "--resume") == 0


@pytest.mark.usefixtures("undrawn")
def test_what_is_noticed_about_updates_is_said_as_in_an_audit_of_ones_own(tmp_path, capsys) -> None:
    """The update is clipped to norm 0.5: named in run.json, on the page and below the table, and certified even so."""
    out = tmp_path / "out"
    options = ["--defense", "noise", "--noise-multiplier", "0", "--clip-norm", "0.5", "--rounds", "1"]
    assert run(out, *options) == 0
    said = json.loads((out / "run.json").read_text())["findings"]["noise"]
    assert "the norm of the update is 0.5: it was clipped to that" in said["clipping"]
    assert "it was clipped to that" in (out / "report.html").read_text()
    assert "it was clipped" in " ".join(capsys.readouterr().out.split())
    solved = [row for row in rows_of(out) if row["attack"] == "patch_embedding"]
    assert solved
    assert all(row["certified"] for row in solved)


@pytest.mark.usefixtures("undrawn")
def test_an_attack_that_raises_is_a_diagnosis_in_its_rows(tmp_path, monkeypatch) -> None:
    def break_down(self, cases):
        raise ZeroDivisionError("no pivot in column 3")

    monkeypatch.setattr(April, "reconstruct_many", break_down)
    assert run(tmp_path / "run", "--rounds", "1") == 0
    rows = rows_of(tmp_path / "run")
    said = {r["attack"]: r["diagnosis"] for r in rows}
    assert said["april"] == "the attack failed: ZeroDivisionError: no pivot in column 3"
    assert said["patch_embedding"] == ""
    assert "the attack failed: ZeroDivisionError" in (tmp_path / "run" / "report.html").read_text()


MISTAKES = [
    (["--defense", "mjq"], "did you mean 'mjp'"),
    (["--defense", "none", "none"], "--defense takes different entries"),
    (["--attacks", "aprill"], "did you mean 'april'"),
    (["--attack-options", "april.x=1"], "attack 'april' has no setting 'x'"),
    (["--attack-options", "dlg.steps=1"], "dlg does not run; choose from: patch_embedding, april"),
    (["--model", "vit_xxl"], "choose from: vit_ti"),
    (["--image-size", "30"], "--image-size 30 must be a multiple of"),
    (["--data", "cifar11"], "cifar10"),
    (["--data", "folder:nowhere"], "nowhere"),
    (["--data", "cifar10", "--data-path", "nowhere"], "nowhere"),
    (["--data", "cifar100"], "--data-path"),
    (["--defense", "mjp", "--gamma", "1.5"], r"--gamma must lie in \[0, 1\]"),
    (["--weights", "nowhere.safetensors"], "no checkpoint at"),
    (["--partition", "sorted"], "dirichlet"),
    (["--clients", "0"], "--clients must be at least 1"),
    (["--clients-per-round", "4"], "--clients-per-round"),
    (["--clients", "5000"], "5000"),
    (["--local-steps", "3"], "--update weights"),
    (["--learning-rate", "-1"], "--learning-rate"),
    (["--audit-clients", "7"], "choose from 0 to 2"),
    (["--audit-rounds", "3"], "choose from 1 to 2"),
    (["--grants", "model_weights"], "position_gradient"),
    (["--grants", "omniscience"], "unknown capability"),
    (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
    (["--device", "meta"], "--device meta cannot be used here"),
    (["--block", "april", "--model", "resnet50"], "plain ViT"),
    (["--lpips-weights", "nowhere.pt"], "no LPIPS weights"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_mistakes_end_with_one_line_and_code_2(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "run", *options) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(words, error)
    assert error.count("\n") == 0
    assert not (tmp_path / "run" / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "spark"], "local.*ray"),
        (["--gamma", "much"], "gamma"),
        (["--no-such-option"], "no-such-option"),
        (["--threads", "-1"], "--threads must not be negative"),
        (["--seed", "99999999999999999999"], "--seed must lie between"),
        (["--dal", "cubic"], "nonlinear"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "run", *options) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(words, error)
    assert error.count("\n") == 0


def test_checkpoint_of_the_wrong_shape(tmp_path, capsys) -> None:
    from safetensors.torch import save_file

    from fedmjp.models import build_model

    save_file(
        build_model("vit_mini_64", num_classes=8, weights="random").module.state_dict(), tmp_path / "other.safetensors"
    )
    assert run(tmp_path / "run", "--weights", str(tmp_path / "other.safetensors")) == 2
    assert "does not fit" in capsys.readouterr().err


def test_second_run_into_the_same_folder(finished, tmp_path, capsys) -> None:
    assert run(finished, "--defense", "none", "mjp") == 2
    assert "--resume" in capsys.readouterr().err
    assert run(finished, "--defense", "none", "mjp", "--resume", "--seed", "1") == 2
    assert "another seed" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_broken_image_in_a_folder_is_skipped_and_told(tmp_path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(
                tmp_path / "images" / name / f"{i}.png"
            )
    (tmp_path / "images" / "a" / "broken.jpg").write_text("this is no image")
    assert run(tmp_path / "run", "--data", f"folder:{tmp_path / 'images'}", "--rounds", "1") == 0
    skipped = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped"]
    assert len(skipped) == 1
    assert "broken.jpg" in skipped[0]
    assert "broken.jpg" in (tmp_path / "run" / "report.html").read_text()


def test_a_batch_larger_than_a_clients_data_is_refused(tmp_path, capsys) -> None:
    assert run(tmp_path / "run", "--train-limit", "6", "--batch-size", "4") == 2
    assert "--batch-size 4 exceeds the 2 images of client 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("undrawn")
def test_batches_of_three_are_matched_and_diagnosed(tmp_path) -> None:
    assert run(tmp_path / "run", "--batch-size", "3", "--rounds", "1") == 0
    rows = [r for r in rows_of(tmp_path / "run") if r["attack"] == "patch_embedding"]
    assert [r["image"] for r in rows] == [0, 1, 2, 0, 1, 2]
    assert all("the batch holds 3 images" in r["diagnosis"] for r in rows)


def test_help_documents_every_option() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "fedmjp.simulate", "--help"], capture_output=True, text=True, check=True
    ).stdout
    flags = set(re.findall(r"--[a-z-]+", text))
    wanted = {f"--{name.replace('_', '-')}" for name in option_places()}
    assert wanted <= flags
    assert "released code: 0.5" in re.sub(r"\s+", " ", re.sub(r"[│╰╭─╮╯]", " ", text))


def test_help_that_is_not_read_to_its_end_ends_quietly() -> None:
    command = [sys.executable, "-m", "fedmjp.simulate", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_configuration_survives_json() -> None:
    config = from_flat({"defense": "none,mjp", "gamma": 0.3, "data_path": "x/y", "audit_rounds": "1,2", "rounds": 4})
    assert RunConfig.from_json(config.to_json()) == config
    assert (config.options.mjp.gamma, config.defense, config.audit.audit_rounds) == (0.3, ("none", "mjp"), (1, 2))


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_has_all_its_rows_and_a_damaged_one_is_refused(tmp_path, monkeypatch, capsys) -> None:
    """Rows that are lost before the end are noticed at the end; a flipped byte of the state, when it is read."""
    out, honest = tmp_path / "run", ClientTask.update

    def update(self, client, number, *state):
        if number == 2:
            raise KeyboardInterrupt
        return honest(self, client, number, *state)

    with monkeypatch.context() as patched:
        patched.setattr(ClientTask, "update", update)
        assert run(out) == 130
    assert not json.loads((out / "run.json").read_text())["finished"]
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for name, place in (("state/none.state", -9), ("rounds.csv", -4), ("run.json", 40), ("rows.jsonl", 60)):
        content = bytearray(kept[out / name])
        content[place] ^= 1
        (out / name).write_bytes(content)
        capsys.readouterr()
        assert run(out, "--resume") == 2, name
        error = capsys.readouterr().err.strip()
        assert name.rpartition("/")[2] in error
        assert error.count("\n") == 0
        (out / name).write_bytes(kept[out / name])
    rows = kept[out / "rows.jsonl"].splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(rows[:-1]))
    (out / "rows.jsonl.sums").unlink()
    assert run(out, "--resume") == 2
    assert (
        f"holds {2 * len(rows) - 1} rows of --defense none, and {2 * len(rows)} were written" in capsys.readouterr().err
    )
    assert not json.loads((out / "run.json").read_text())["finished"]
