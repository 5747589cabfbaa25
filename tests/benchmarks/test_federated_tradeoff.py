"""The accuracy-privacy plane: a small run, resumption, mistakes, and what is drawn and written of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import federated_tradeoff
import numpy as np
import pandas as pd
import pytest
from experiments.client_recipes import RECIPES, recipe_of, with_recipe
from experiments.tradeoff import figure
from experiments.tradeoff.options import Options
from experiments.tradeoff.protocol import federations
from experiments.tradeoff.table import (
    markdown,
    placed,
    ranked,
)

from attacks import ATTACKS, UsageError
from attacks.active.base import ActiveAttack
from fedmjp.client import ClientTask
from fedmjp.config import RunConfig
from fedmjp.models.weights import SHIPPED
from fedmjp.records.images import read_pair
from fedmjp.records.rows import load_rows
from tests.conftest import interrupted_at

pytestmark = pytest.mark.usefixtures("undrawn")  # but for the fixture `whole`

SMALL = ["--data", "photos", "--clients", "3", "--rounds", "2", "--audit-points", "2", "--audit-clients", "2"]
SMALL += ["--test-images", "8", "--threads", "1", "--at-most", "1", "--steps", "1", "--partitions", "iid"]
FAST = ["--attacks", "patch_embedding,mjp_subspace,inverting_gradients", "--gammas", "0.5"]


def run(out: Path, *options: str) -> int:
    """Exit code of the command line, in this process."""
    try:
        return federated_tradeoff.main([*SMALL, *options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


def rows_of(out: Path) -> pd.DataFrame:
    """Rows without what may differ between equal runs."""
    return load_rows(out / "rows.jsonl.gz").drop(columns="seconds")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run of three federations."""
    out = tmp_path_factory.mktemp("tradeoff") / "out"
    assert run(out, *FAST) == 0
    return out


def test_writes_table_and_figure_with_every_attack(whole) -> None:
    names = {p.name for p in whole.iterdir()}
    assert names >= {"rows.jsonl.gz", "rounds.csv", "table.csv", "table.md", "tradeoff.png", "run.json"}
    table = pd.read_csv(whole / "table.csv", keep_default_na=False)
    points = ["none", "nope", "mjp, γ = 0.5"]
    assert list(dict.fromkeys(table["point"])) == points
    for point in points:
        own = table[table["point"] == point]
        assert set(own["attack"]) == {*ATTACKS, "mean_image", "other_image"}
        assert set(own.loc[own["attack"] == "april", "note"]) == {"not run: not among --attacks"}
    by = table.set_index(["point", "attack"])
    assert float(by.loc[("none", "patch_embedding"), "psnr_mean"]) > 60
    assert "no learnable position embedding" in by.loc[("nope", "patch_embedding"), "note"]
    assert float(by.loc[("none", "patch_embedding"), "test_images"]) == 8
    text = (whole / "table.md").read_text()
    assert all(name in text for name in ATTACKS)
    assert "What it cannot tell" in text
    assert len(json.loads((whole / "run.json").read_text())["federations"]) == 3


@pytest.mark.long
def test_federations_fine_tune_an_encoder_under_a_new_classifier(tmp_path, capsys) -> None:
    out, weights = tmp_path / "out", SHIPPED / "vit_mini_32.safetensors"
    asked = ["--attacks", "patch_embedding", "--defenses", "none", "mjp", "nope", "--from", str(weights)]
    assert run(out, *asked) == 0
    rows = load_rows(out / "rows.jsonl.gz")
    assert rows["weights"].str.startswith("encoder of vit_mini_32.safetensors").all()
    assert rows["weights"].str.contains("head new").all()
    none = rows[(rows["defense"] == "none") & (rows["attack"] == "patch_embedding")]
    assert none["psnr"].min() > 60
    assert run(out, *asked[:-2], "--resume") == 2
    assert "another model" in capsys.readouterr().err
    assert run(tmp_path / "other", *asked, "--weights", "long") == 2
    assert "leave out --weights long" in capsys.readouterr().err


def test_federations_differ_in_their_defence_alone(whole) -> None:
    rows = rows_of(whole)
    assert set(rows["model"]) == {"vit_mini_32", "vit_mini_32_nope", "vit_mini_32_mjp"}
    ids = [list(group["image_id"]) for _, group in rows[rows["attack"] == "mean_image"].groupby("model")]
    assert ids[0] == ids[1] == ids[2]
    rounds = pd.read_csv(whole / "rounds.csv")
    assert rounds.groupby("point")["round"].apply(list).to_dict() == {p: [0, 1, 2] for p in set(rounds["point"])}


@pytest.mark.long  # what a crash leaves of a federation: tests/test_crash.py
def test_interrupted_run_resumes_to_the_same_rows(whole, tmp_path, capsys) -> None:
    out, stop_at = tmp_path / "broken", 11  # in the second federation
    with interrupted_at(ClientTask, "update", stop_at) as calls:
        assert run(out, *FAST) == 130
        assert run(out, *FAST) == 2
        assert "pass --resume" in capsys.readouterr().err
        assert run(out, *FAST, "--resume") == 0
    assert len(calls) == 3 * 2 * 3 + 1 + (stop_at - 1) % 3  # the broken round alone is trained again
    pd.testing.assert_frame_equal(rows_of(out), rows_of(whole))
    assert (out / "rounds.csv").read_text() == (whole / "rounds.csv").read_text()


@pytest.mark.long
def test_a_finished_run_takes_further_federations(whole, tmp_path, monkeypatch) -> None:
    honest, calls = ClientTask.update, []

    def update(self, *place):
        calls.append(place[:2])
        return honest(self, *place)

    monkeypatch.setattr(ClientTask, "update", update)
    out = tmp_path / "more"
    shutil.copytree(whole, out)
    noise = ["--defenses", "noise", "--noise-multipliers", "0.001"]
    assert run(out, "--attacks", "patch_embedding", "--defenses", "none", "--resume") == 2  # it was attacked otherwise
    assert run(out, *FAST, *noise, "--resume") == 0
    assert len(calls) == 3 * 2
    before, after = rows_of(whole), rows_of(out)
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before)
    assert set(after["defense"]) == {"none", "mjp", "noise"}
    assert run(out, *FAST, "--resume", "--learning-rate", "0.1") == 2
    table = pd.read_csv(out / "table.csv")
    assert table["point"].iloc[-1] == "noise, σ = 0.001"


def test_what_the_server_may_not_see_is_told(tmp_path) -> None:
    options = [
        "--defenses",
        "none",
        "nope",
        "--attacks",
        "patch_embedding",
        "mjp_rounds",
        "--rounds",
        "1",
        "--audit-points",
        "1",
    ]
    assert run(tmp_path / "out", *options, "--grants", "model_weights", "position_gradient") == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv").set_index(["point", "attack"])
    assert "needs several_rounds" in table.loc[("none", "mjp_rounds"), "note"]
    assert table.loc[("none", "patch_embedding"), "count"] == 1  # --at-most 1


@pytest.mark.long  # as mjp_adaptive with all attacks, in three federations
def test_every_attack_gives_rows_or_a_reason(tmp_path) -> None:
    small = ["--model", "vit_micro8_32", "--gammas", "0.9", "--rounds", "1", "--audit-points", "1"]
    assert run(tmp_path / "out", *small) == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv", keep_default_na=False)
    assert set(table["attack"]) == {*ATTACKS, "mean_image", "other_image"}
    silent = table[table["psnr_mean"].astype(str) == ""]
    assert len(silent)
    assert (silent["note"] != "").all()


MISTAKES = [
    (["--attacks", "dgl"], "did you mean 'dlg'"),
    (["--partitions", "sorted"], "choose from: iid, dirichlet:ALPHA"),
    (["--gammas", "1.5"], "--gamma must lie in"),
    (["--model", "vit_mini_32_nope"], "without suffix"),
    (["--model", "swin_t"], "plain ViT"),
    (["--image-size", "30"], "--image-size 30 must be a multiple of 4"),
    (["--audit-points", "3"], "--audit-points 3 needs as many --rounds"),
    (["--at-most", "unmix=none"], "--at-most takes NUMBER or ATTACK=NUMBER"),
    (["--steps", "0"], "--steps takes NUMBER"),
    (["--clients", "0"], "--clients must be at least 1"),
    (["--defenses", "none", "none"], "--defenses takes one or more different entries"),
    (["--defenses", "mjp", "--gammas"], "--defenses mjp needs --gammas"),
    (["--defenses", "quantise:quantise_format=decimal"], "quantise_format"),
    (["--defenses", "mjp+mjp"], "mjp"),
    (["--recipes", "batch of 3"], "choose from: one image, flip"),
    (["--recipes", "flip", "flip"], "--recipes takes one or more different entries"),
    (["--secure-aggregation", "2"], "--secure-aggregation 2 makes no equal groups of the 3 clients"),
    (["--secure-aggregation", "0", "4"], "--secure-aggregation 4 makes no equal groups of the 3 clients"),
    (["--secure-aggregation", "3", "3"], "--secure-aggregation takes one or more different entries"),
    (["--seeds", "1", "1"], "--seeds takes one or more different entries"),
    (["--grants", "omniscience"], "unknown capability"),
    (["--data", "cifar10", "--data-path", "nowhere"], "nowhere"),
    (["--weights", "nowhere.safetensors"], "no checkpoint at"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_mistakes_are_one_line_and_exit_with_2(tmp_path, capsys, options: list[str], words: str) -> None:
    assert run(tmp_path / "out", *options) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert words in error[0]
    assert not (tmp_path / "out").exists()


def test_any_registered_defence_has_its_federation(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--defenses", "spp", "frozen_positions", "--spp-probability", "0.25", "--attacks", "patch_embedding"]
    assert run(out, *options, "--rounds", "1", "--audit-points", "1") == 0
    table = pd.read_csv(out / "table.csv", keep_default_na=False).set_index(["point", "attack"])
    assert list(dict.fromkeys(table.index.get_level_values(0))) == ["frozen_positions", "spp, spp_probability = 0.25"]
    assert (
        "holds no gradient of pos_embed (frozen or withheld)"
        in table.loc[("frozen_positions", "patch_embedding"), "note"]
    )
    assert len(list((out / "federations").iterdir())) == 2


def test_federations_of_another_image_size(tmp_path, capsys) -> None:
    out, federation = tmp_path / "out", ["--rounds", "1", "--audit-points", "1", "--defenses", "none"]
    options = [*federation, "--attacks", "patch_embedding", "--resume"]
    assert run(out, *options, "--image-size", "16") == 0
    (row,) = load_rows(out / "rows.jsonl.gz").query("attack == 'patch_embedding'").head(1).to_dict("records")
    (folder,) = (out / "federations").iterdir()
    assert [picture.shape for picture in read_pair(folder, row)] == [(3, 16, 16)] * 2
    assert row["psnr"] > 40
    assert run(out, *options) == 2
    assert "federations with another model" in capsys.readouterr().err


def test_parts_of_a_chain_have_the_options_that_they_have_alone() -> None:
    entries = ("noise", "mjp:gamma=0.5+noise:noise_multiplier=0.001")
    options = Options(defenses=entries, noise_multipliers=(0.001,), partitions=("iid",))
    alone, chain = (one.config.defence(one.config.defense[0]) for one in federations(options))
    assert alone.clip_norm == 30
    assert dict(chain.parts)["noise"] == alone


@pytest.mark.long
def test_entries_with_settings_and_chains_run_as_written_under_a_recipe(tmp_path) -> None:
    """Clients feed two images; each original is looked for among the test images."""
    out = tmp_path / "out"
    entries = [
        "mjp:gamma=0.5,mask_choice=fixed",
        "quantise:quantise_format=int4,quantise_per=row",
        "mjp:gamma=0.5+noise",
    ]
    options = ["--defenses", "none", *entries, "--recipes", "batch of 2", "--attacks", "patch_embedding"]
    assert run(out, *options, "--rounds", "1", "--audit-points", "1", "--at-most", "2") == 0
    points = ["none", "mjp, gamma = 0.5, mask_choice = fixed", "mjp:gamma=0.5+noise"]
    points.append("quantise, quantise_format = int4, quantise_per = row")
    points = [f"{point}, batch of 2" for point in points]
    table = pd.read_csv(out / "table.csv").set_index(["point", "attack"])
    assert list(dict.fromkeys(table.index.get_level_values(0))) == points
    rows = rows_of(out)
    assert set(rows["batch_size"]) == {2}
    assert set(json.loads((out / "run.json").read_text())["recipes"].values()) == {"batch of 2"}
    ranks = pd.read_csv(out / "ranks.csv")
    assert set(ranks["attack"]) == {"patch_embedding"}
    assert set(ranks["candidates"]) == {9}
    for point in points:
        own = ranks[ranks["point"] == point]
        assert len(own) == len(rows[(rows["attack"] == "patch_embedding")]) / 4
        assert table.loc[(point, "patch_embedding"), "reidentified_mean"] == (own["rank"] == 1).mean()
    assert np.isnan(table.loc[("none, batch of 2", "mean_image"), "reidentified_mean"])
    assert "original nearest of 9" in (out / "table.md").read_text()


@pytest.mark.long
def test_recipes_stand_beside_each_other_and_change_the_clients_alone(tmp_path) -> None:
    """Another recipe joins the folder on resumption; the weights that clients send are those of the recipe."""
    out = tmp_path / "out"
    options = ["--defenses", "none", "--rounds", "1", "--audit-points", "1", "--attacks", "patch_embedding"]
    assert run(out, *options, "--recipes", "one image", "flip") == 0
    assert run(out, *options, "--recipes", "2 local steps", "AdamW", "--resume") == 0
    table = pd.read_csv(out / "table.csv")
    points = ["none", "none, 2 local steps", "none, AdamW", "none, flip"]
    assert list(dict.fromkeys(table["point"])) == points
    rows = rows_of(out)
    assert rows.groupby("update").run_id.nunique().to_dict() == {"gradient": 2, "weights": 2}
    assert set(pd.read_csv(out / "rounds.csv")["point"]) == set(points)
    configs = [json.loads(file.read_text())["config"] for file in (out / "federations").glob("*/run.json")]
    assert sorted(config["local"]["augment"] for config in configs) == ["flip", "none", "none", "none"]
    assert sorted(config["federation"]["local_steps"] for config in configs) == [1, 1, 1, 2]
    assert run(out, *options, "--learning-rate", "0.5", "--resume") == 2


def test_sums_of_clients_are_points_of_their_own_that_train_alike(tmp_path) -> None:
    """Every client of an attacked group counts, at the accuracy of the same training seen client by client."""
    out = tmp_path / "out"
    options = ["--defenses", "none", "--secure-aggregation", "0", "3", "--attacks", "patch_embedding"]
    assert run(out, *options, "--audit-points", "1", "--rounds", "1") == 0
    points = ["none", "none, sum of 3 clients"]
    rounds = pd.read_csv(out / "rounds.csv")
    assert list(dict.fromkeys(rounds["point"])) == points
    alone, summed = (rounds.loc[rounds["point"] == point, "accuracy"].tolist() for point in points)
    assert alone == summed
    table = pd.read_csv(out / "table.csv").set_index(["point", "attack"])
    assert table.loc[[(point, "mean_image") for point in points], "count"].tolist() == [2, 3]
    assert table.loc[("none", "patch_embedding"), "psnr_mean"] > 40
    assert table.loc[("none, sum of 3 clients", "patch_embedding"), "psnr_mean"] < 20
    assert set(pd.read_csv(out / "ranks.csv")["point"]) == set(points)


def test_every_recipe_is_read_back_from_its_options() -> None:
    config = RunConfig()
    for name in RECIPES:
        assert recipe_of(with_recipe(config, name)) == name
    with pytest.raises(UsageError, match="no recipe has the settings"):
        recipe_of(replace(config, local=replace(config.local, dropout=0.7)))


def test_a_line_gives_the_mean_of_each_attacked_round(whole) -> None:
    rows = placed(rows_of(whole), {}).groupby(["partition", "point", "attack", "round"])["psnr"].mean()
    table = pd.read_csv(whole / "table.csv").set_index(["partition", "point", "attack"])["psnr_by_round"].dropna()
    found = {
        (*line, int(n)): float(m)
        for line, text in table.items()
        for n, _, m in (part.partition("=") for part in text.split())
    }
    assert found == {line: round(mean, 1) for line, mean in rows.dropna().items()}


def test_a_share_that_was_not_measured_leaves_its_cell_empty(whole) -> None:
    table = pd.read_csv(whole / "table.csv").fillna({"note": "", "most_patches": ""})
    assert ranked(table)
    measured, without = markdown(table), markdown(table.drop(columns=["recognised_mean"]))
    assert measured.splitlines()[2].count("] %") == without.splitlines()[2].count("] %") + 1
    assert "nan" not in without.splitlines()[2]


def test_many_defences_are_drawn_as_lines(whole, tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(figure, "save", lambda made, path: drawn.append(made))
    table = pd.read_csv(whole / "table.csv").fillna({"note": "", "most_patches": ""})
    many = pd.concat([table.assign(point=[f"{p}, x = {n}" for p in table["point"]]) for n in range(5)])
    figure.tradeoff_figure(many, pd.DataFrame(), pd.DataFrame(), tmp_path / "lines.png")
    lines, planes = drawn[0].axes[:4], drawn[0].axes[4:]
    found = many[many["strongest"]]
    assert len(found) == 15
    labels = [label.get_text() for label in lines[0].get_yticklabels()]
    assert sorted(label.partition(": ")[0] for label in labels) == sorted(found["point"])
    labels = [axes.get_xlabel().replace("\n", " ") for axes in lines]
    assert labels == ["Test accuracy (%)", "PSNR (dB)", "LPIPS below 0.1 (%)", "Nearest of 9 (%)"]
    for axes in planes:
        ranges = [part.split("-") for text in axes.texts for part in text.get_text().split(", ")]
        assert sorted(n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)) == list(range(1, 16))


def test_all_is_every_attack_that_is_granted_and_auto_is_left_to_the_updates() -> None:
    assert Options().attacks == ("all",)
    assert set(Options().runnable()) | set(Options().not_run()) == set(ATTACKS)
    granted = Options(grants=("position_gradient",), attacks=("all",))
    assert "unmix" not in granted.runnable()
    assert "model_weights" in granted.not_run()["unmix"]
    auto = Options(attacks=("auto", "dlg"), budget="3s")
    assert auto.runnable() == ("auto", "dlg")
    active = {name for name in ATTACKS if issubclass(ATTACKS.get(name), ActiveAttack)}
    assert set(auto.not_run()) == {"mjp_mixture", "known_draws", *active}  # need what no passive server has
    assert "auxiliary_data" in auto.not_run()["mjp_mixture"]
    assert Options(attacks=("dlg",)).not_run()["april"] == "not run: not among --attacks"


def test_objectives_are_lines_measured_by_a_probe(tmp_path, capsys) -> None:
    """Options of an objective hold commas; both crops are scored; a probe's accuracy stands with no classifier's."""
    out = tmp_path / "out"
    small = ["--model", "vit_micro8_32", "--rounds", "1", "--audit-points", "1", "--attacks", "patch_embedding"]
    small += ["--defenses", "none", "nope"]
    objectives = ["--objectives", "supervised", "mst:local_crops=0,outputs=8,hidden=8,bottleneck=4"]
    assert run(out, *small, *objectives) == 0
    rounds = pd.read_csv(out / "rounds.csv")
    assert list(rounds["point"]) == ["none", "none", "nope", "nope", "mst", "mst"]
    assert list(rounds["round"]) == [0, 1] * 3
    assert rounds["accuracy"].between(0, 1).all()
    rows = rows_of(out)
    crops = rows[(rows["objective"] == "mst") & (rows["attack"] == "patch_embedding")]
    assert list(crops["image"]) == [0, 1]
    assert crops["setting"].str.endswith("scored against the crops fed").all()
    table = pd.read_csv(out / "table.csv")
    assert list(dict.fromkeys(table["point"])) == ["supervised", "nope", "mst"]
    assert run(out, *small, "--resume") == 2
    assert "federations whose accuracy is that of a linear probe" in capsys.readouterr().err
    assert run(tmp_path / "twice", "--objectives", "mp3", "mp3:eta=0.5") == 2
    assert "each once" in capsys.readouterr().err
