"""The speed benchmark runs whole and compares like with like; how fast it is, is no test."""

from __future__ import annotations

import json
import multiprocessing

import campaign_speed
import mjp_overhead
import pandas as pd
import pytest
import round_overhead
import speed as command
import training_speed as training_command
from experiments.speed import matching_speed, speed, timing, training_speed
from experiments.speed.options import SpeedOptions, TrainingSpeedOptions

from attacks.breaching import prepare_attack
from fedmjp.records import provenance


@pytest.fixture
def forked_processes(monkeypatch) -> None:
    """Processes that measure memory are forked from one that has imported the packages, instead of importing them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["breaching", "fedmjp.audit.campaign", "fedmjp.models"])
    monkeypatch.setattr(timing.multiprocessing, "get_context", lambda method: context)


@pytest.mark.long
def test_writes_its_tables(tmp_path, capsys, monkeypatch, forked_processes) -> None:
    pytest.importorskip("breaching")
    monkeypatch.setattr(matching_speed, "LONG", matching_speed.SHORT + 2)
    options = [
        "--model",
        "vit_mini_64",
        "--images",
        "2",
        "--batch-size",
        "2",
        "--repeats",
        "1",
        "--matching-model",
        "vit_micro_32",
        "--matching-batches",
        "1",
        "--matching-rounds",
        "2",
    ]
    assert command.main([*options, "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "speed.csv").set_index("block")
    assert (table["ours_over_bare_median"] > 0).all()
    assert table.loc["april", "peer_over_ours_median"] > 0
    drivers = pd.read_csv(tmp_path / "drivers.csv")
    assert len(drivers) == 5
    assert drivers["relative_error"].max() < 0.1
    assert json.loads((tmp_path / "run.json").read_text())["leakage"]["lpips"] is False
    matching = pd.read_csv(tmp_path / "matching.csv").set_index("way")
    assert set(matching.index) == {"peer", "same", "alone", "together"}
    assert matching.loc["peer", "times_faster_mean"] == 1.0
    assert (matching["peak_mib"] > 0).all()
    assert "without LPIPS" in capsys.readouterr().out


def test_the_peer_is_given_the_same_gradients_and_finds_the_same_image(monkeypatch) -> None:
    pytest.importorskip("breaching")
    bench = speed.Bench(SpeedOptions(model="vit_mini_64", images=2, batch_size=2), "april")
    scored: list[float] = []
    score = bench.score

    def noting(found, originals):
        records = score(found, originals)
        scored.extend(r["psnr"] for r in records)
        return records

    bench.score = noting
    bench.peer()
    bench.ours()
    assert scored[:2] == pytest.approx(scored[2:], abs=1.0)


@pytest.mark.long
def test_searches_that_are_timed_walk_the_same_way() -> None:
    pytest.importorskip("breaching")
    searches = matching_speed.Searches("vit_mini_32", 1, "cpu")
    theirs = prepare_attack(searches.views[0], "invertinggradients", ["optim.max_iterations=2"]).run(
        searches.start[0, 0]
    )[1]
    seen: list[list[float]] = []
    run = matching_speed.minimise

    def noting(*arguments):
        outcome = run(*arguments)
        seen.append(outcome.trace[:, 0, 0].tolist())
        return outcome

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matching_speed, "minimise", noting)
        searches.same(2)
        searches.alone(2)
        searches.together(2)
    for ours in seen:
        assert ours == pytest.approx(theirs, rel=0.05)  # the package's total variation counts the image's frame
        assert ours == pytest.approx(seen[0], rel=1e-3)


def test_nonsense_is_refused(tmp_path, capsys) -> None:
    assert command.main(["--images", "0", "--out", str(tmp_path)]) == 2
    assert "--images must be at least 1" in capsys.readouterr().err


def test_overheads_write_their_tables(tmp_path) -> None:
    step = ["--model", "vit_mini_64", "--batch-size", "2", "--steps", "1", "--gammas", "0.5"]
    assert mjp_overhead.main([*step, "--out", str(tmp_path / "step")]) == 0
    assert pd.read_csv(tmp_path / "step" / "overhead.csv")["step_ratio_median"].gt(0).all()
    whole = ["--models", "vit_mini_64", "--clients", "2", "--batch-sizes", "1", "--repeats", "1"]
    assert round_overhead.main([*whole, "--out", str(tmp_path / "round")]) == 0
    assert pd.read_csv(tmp_path / "round" / "overhead.csv")["ratio_median"].gt(0).all()
    assert round_overhead.main([*whole, "--batch-sizes", "2", "--resume", "--out", str(tmp_path / "round")]) == 0
    assert pd.read_csv(tmp_path / "round" / "overhead.csv")["batch_size"].tolist() == [1, 2]
    for name in ("step", "round"):
        assert json.loads((tmp_path / name / "run.json").read_text())["devices"]


def test_the_bare_loop_takes_the_steps_of_our_training() -> None:
    options = TrainingSpeedOptions(precision="float32")
    bench = training_speed.Bench(options, "vit_micro_32", 32, 4)
    losses = pd.DataFrame([bench.pair(number)[1] for number in range(4)])
    assert losses["ours"].nunique() == 4
    assert losses["bare"].tolist() == pytest.approx(losses["ours"].tolist(), rel=1e-6)
    assert losses["fused"].tolist() == pytest.approx(losses["ours"].tolist(), rel=1e-4)


def test_training_speed_writes_its_table(tmp_path, capsys) -> None:
    case = ["--models", "vit_micro_32", "--image-sizes", "24", "--batch-sizes", "4", "--precision", "float32"]
    assert training_command.main([*case, "--warm-up", "1", "--repeats", "2", "--out", str(tmp_path)]) == 0
    runs, table = (pd.read_csv(tmp_path / name) for name in ("runs.csv", "table.csv"))
    assert runs["repeat"].tolist() == [0, 1]
    assert table.loc[0, "image_size"] == 24
    ratio = (runs["ours_seconds"] / runs["bare_seconds"]).median()
    assert table.loc[0, "step_over_bare_median"] == pytest.approx(ratio, rel=1e-3)
    assert training_command.main(["--models", "swin_t", "--image-sizes", "224", "--batch-sizes", "4"]) == 2
    assert "--models takes plain ViTs, which a bare timm loop can train, not swin_t" in capsys.readouterr().err


def test_a_campaign_is_timed_in_one_process_and_in_two(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "8e29471")  # pandas reads it as infinity
    given = ["--model", "vit_micro_32", "--num-images", "4", "--batch-size", "2", "--out", str(tmp_path)]
    assert campaign_speed.main([*given, "--repeats", "1"]) == 0
    assert campaign_speed.main([*given, "--repeats", "2", "--resume"]) == 0
    runs = pd.read_csv(tmp_path / "runs.csv")
    assert list(zip(runs["repeat"], runs["executor"], strict=True)) == [
        (repeat, executor) for repeat in (0, 1) for executor in ("one process", "--workers 2")
    ]
    table = pd.read_csv(tmp_path / "table.csv").set_index("executor")
    assert table.loc["one process", "speedup_median"] == 1
    pairs = runs.pivot(index="repeat", columns="executor", values="core_seconds")
    expected = (pairs["one process"] / pairs["--workers 2"]).median()
    assert table.loc["--workers 2", "core_speedup_median"] == pytest.approx(expected, rel=1e-3)
    assert campaign_speed.main([*given, "--workers", "1"]) == 2
    assert "--workers must be at least 2, not 1" in capsys.readouterr().err
