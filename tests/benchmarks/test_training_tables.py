"""Backbones, ablation and masking ratio as a user meets them: lines, files, mistakes."""

from __future__ import annotations

import json

import ablation as ablation_command
import backbones as backbone_command
import fine_tuning as fine_tuning_command
import masking_ratio as ratio_command
import pandas as pd
import precision as precision_command
import pytest
from experiments.trainings import ablation, backbones, fine_tuning, masking_ratio
from experiments.trainings.options import AblationOptions, BackboneOptions, FineTuningOptions, RatioOptions
from experiments.trainings.seeds import METRICS
from safetensors.torch import save_file

from fedmjp.models import build_model

SMALL = ["--data", "photos", "--train-limit", "16", "--test-limit", "8", "--batch-size", "8", "--gammas", "0", "0.5"]


def run(script, folder, *more: str) -> int:
    """Exit code of a script on two steps of photographs."""
    try:
        return script.main([*SMALL, "--trainings", str(folder / "rows"), "--out", str(folder / "out"), *more])
    except SystemExit as stop:  # the parser of the command line leaves this way
        return int(stop.code)


def test_papers_figures_reach_their_lines() -> None:
    first = backbones.paper(backbones.variants_of(BackboneOptions()))
    assert first["resnet_micro_32 + MJP"] == {"accuracy": 79.4, "diff_norm": 7.11, "consistency": 69.3}
    assert first["vit_micro_32"]["diff_norm"] == 16.21
    assert len(first) == 6
    third = masking_ratio.paper()
    assert third["0.1"]["diff_norm"] == 8.96
    assert third["0"]["accuracy"] == 80.0
    second = ablation.paper()
    assert second.loc["F", "consistency"] == 79.6
    assert second.index.tolist() == [line.name for line in ablation.variants_of("vit_micro_32", 0.1)]


def test_lines_of_different_tables_share_their_trainings() -> None:
    """A stands in Tables 1 and 2, J in all three, D in Tables 2 and 3."""
    from experiments.trainings.variants import training_id

    tables = [
        (BackboneOptions(), backbones.variants_of(BackboneOptions())),
        (AblationOptions(), ablation.variants_of("vit_micro_32", 0.1)),
        (RatioOptions(), masking_ratio.variants_of(RatioOptions())),
    ]
    found = [[training_id(o.config(line, 0)) for line in lines] for o, lines in tables]
    assert len({i for ids in found for i in ids}) == 6 + 10 + 6 - 4
    assert found[0][2] == found[1][0]
    assert found[0][3] == found[1][9] == found[2][1]
    assert found[1][3] == found[2][0]


def test_lines_of_fine_tuning_have_the_papers_figures() -> None:
    options = FineTuningOptions()
    found = fine_tuning.paper(options)
    assert [line.name for line in fine_tuning.variants_of(options)] == ["A", "J", "J, γ = 0.5", "J, γ = 0.9"]
    assert found["A"] == {"accuracy": 79.8, "consistency": 64.3, "diff_norm": 16.21}
    assert found["J"] == {"accuracy": 80.5, "consistency": 82.9, "diff_norm": 8.96}
    assert found["J, γ = 0.9"] == {"accuracy": 80.3, "consistency": 93.1, "diff_norm": 3.97}


def test_fine_tuning_starts_every_line_from_the_same_weights(tmp_path, capsys) -> None:
    """At another size than the weights'; their name, that size and the seed make a training's identity."""
    start = build_model("vit_micro_32", num_classes=12, weights="random", seed=5)
    save_file(start.module.state_dict(), tmp_path / "start.safetensors")
    options = ["--model", "vit_micro_32", "--image-size", "24", "--lines", "A", "J", "--more-gammas", "0.5"]
    options += ["--seeds", "0", "--learning-rate", "1e-9"]
    assert run(fine_tuning_command, tmp_path, *options, "--weights", str(tmp_path / "start.safetensors")) == 0
    rows = pd.read_json(tmp_path / "rows" / "rows.jsonl.gz", lines=True)
    assert rows["training"].nunique() == 3
    assert set(rows["start"]) == {"start.safetensors"}
    assert set(rows["image_size"]) == {24}
    plain = rows[rows["gamma"] == 0]
    assert plain["test_loss"].max() - plain["test_loss"].min() < 1e-3  # hardly a step was taken
    assert "start.safetensors" in plain["weights"].iloc[0]


def test_a_table_and_its_files(tmp_path, capsys) -> None:
    options = ["--training-gammas", "0", "0.9", "--seeds", "0", "1"]
    assert run(ratio_command, tmp_path, *options) == 0
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {"table.csv", "table.md", "figure.png", "figure.pdf", "run.json"}
    table = pd.read_csv(out / "table.csv", dtype={"line": str})
    assert table["line"].tolist() == ["0"] * len(METRICS) + ["0.9"] * len(METRICS)
    assert (table["seeds"] == 2).all()
    assert set(table["verdict"].dropna()) <= {"agrees", "contradicts", "cannot tell"}
    assert json.loads((out / "run.json").read_text())["rows"] == 8
    assert (tmp_path / "rows" / "rows.jsonl.gz").exists()
    assert json.loads((tmp_path / "rows" / "history" / "run.json").read_text())["rows"] == 4  # an epoch a training
    before = (tmp_path / "rows" / "rows.jsonl.gz").read_bytes()
    assert run(ratio_command, tmp_path, *options) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run(ratio_command, tmp_path, *options, "--resume") == 0
    assert (tmp_path / "rows" / "rows.jsonl.gz").read_bytes() == before


def test_backbones_write_their_table(tmp_path) -> None:
    assert run(backbone_command, tmp_path, "--models", "vit_micro_32", "--seeds", "0") == 0
    assert "vit_micro_32 + MJP" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.long
def test_precisions_are_compared_on_the_same_seed_and_timed(tmp_path) -> None:
    options = ["--timing-model", "vit_mini_32", "--timing-rounds", "1"]
    assert run(precision_command, tmp_path, "--seeds", "0", *options) == 0
    rows = pd.read_json(tmp_path / "rows" / "rows.jsonl.gz", lines=True)
    assert sorted(rows.groupby("training")["precision"].first()) == ["bfloat16", "bfloat16", "float32", "float32"]
    assert rows["training"].nunique() == 4
    timed = pd.read_csv(tmp_path / "out" / "latency.csv").set_index("line")
    assert timed.loc["float32", "ratio_median"] == 1
    assert set(timed["model"]) == {"vit_mini_32", "vit_mini_32_mjp"}
    assert "step / float32's" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.long
def test_every_variant_trains_and_is_timed(tmp_path) -> None:
    assert run(ablation_command, tmp_path, "--seeds", "0", "--timing-rounds", "2") == 0
    timed = pd.read_csv(tmp_path / "out" / "latency.csv").set_index("line")
    assert timed.index.tolist() == list("ABCDEFGHIJ")
    assert timed.loc["A", "ratio_median"] == 1
    assert (timed["ratio_median"] > 0).all()


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (backbone_command, ["--models", "vit_huge"], "unknown model"),
        (backbone_command, ["--training-gamma", "2"], "--gamma must lie in"),
        (ablation_command, ["--model", "resnet_micro_32"], "unknown model"),
        (ablation_command, ["--timing-rounds", "-1"], "--timing-rounds"),
        (ratio_command, ["--training-gammas"], "--training-gammas"),
        (ratio_command, ["--training-gammas", "0.1", "0.1"], "--training-gammas"),
        (ratio_command, ["--epochs", "many"], "epochs"),
        (fine_tuning_command, ["--weights", "random"], "needs trained weights"),
        (fine_tuning_command, ["--lines", "J"], "--lines takes A and different others"),
        (fine_tuning_command, ["--weights", "nowhere.pt"], "no checkpoint at nowhere.pt"),
    ],
)
def test_mistakes_end_in_one_line(script, options, words, tmp_path, capsys) -> None:
    assert run(script, tmp_path, *options) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
