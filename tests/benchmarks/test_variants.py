"""Variants of a table: trained once, shared, gone on with after an interrupt, refused when they make no sense."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from experiments.trainings import variants as engine
from experiments.trainings.options import SHORT, TrainingOptions, Variant
from experiments.trainings.variants import HISTORY, TRAININGS, limits, train_variants, training_id
from rich.console import Console
from safetensors.torch import load_file

from attacks import UsageError
from fedmjp.config import DataConfig
from fedmjp.records.rows import RowLog, load_rows
from fedmjp.training.trainer import Trainer
from tests.conftest import interrupted_at

QUIET = Console(quiet=True)
PLAIN = Variant("A", "vit_micro_32")
JIGSAWED = Variant("J", "vit_micro_32", "mjp", {"gamma": 0.5}, against="A")
MOVING = ["train_seconds"]


def options(folder: Path, **changes) -> TrainingOptions:
    """Two seeds of two steps on photographs."""
    given = {
        "data": DataConfig("photos", None, 16, 8),
        "recipe": dataclasses.replace(SHORT, batch_size=8),
        "gammas": (0.0, 0.5),
        "seeds": (0, 1),
        "trainings": folder / "trainings",
        "out": folder / "out",
    }
    return TrainingOptions(**(given | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pd.DataFrame:
    """The rows of an unbroken table."""
    return train_variants([PLAIN, JIGSAWED], options(tmp_path_factory.mktemp("lines")), QUIET)


def test_rows_say_what_was_trained(whole) -> None:
    assert len(whole) == 8
    assert whole["line"].tolist() == ["A"] * 4 + ["J"] * 4
    assert sorted(set(whole["seed"])) == [0, 1]
    assert set(whole[whole["line"] == "J"]["positions"]) == {"unknown"}
    assert set(whole[whole["line"] == "J"]["model"]) == {"vit_micro_32_mjp"}
    assert (whole["images_seen"] == 16).all()
    assert (whole[whole["gamma"] == 0]["consistency"] == 100).all()
    assert whole["defense_parameters"].iloc[-1]["gamma"] == 0.5
    assert not whole[["commit", "provenance", "weights", "accuracy", "train_loss"]].isna().any().any()


def test_limits_are_told_in_the_rows_own_figures(whole) -> None:
    text = limits(whole, True)
    assert "saw 16 images" in text
    kept = whole[(whole["line"] == "A") & (whole["gamma"] == 0.5)]["consistency"].mean()
    assert f"A plain vit_micro_32 keeps {kept:.1f} %" in text
    assert "the paper" not in limits(whole, False)


def test_interrupted_and_resumed_equals_unbroken(whole, tmp_path) -> None:
    with interrupted_at(engine, "train_and_measure", 3), pytest.raises(KeyboardInterrupt):
        train_variants([PLAIN, JIGSAWED], options(tmp_path), QUIET)
    with RowLog(tmp_path / "trainings" / "rows.jsonl", TRAININGS) as log:
        assert {row["seed"] for row in log.rows()} == {0}  # one seed of every variant comes first
    resumed = train_variants([PLAIN, JIGSAWED], options(tmp_path, resume=True), QUIET)
    pd.testing.assert_frame_equal(resumed.drop(columns=MOVING), whole.drop(columns=MOVING))
    history = load_rows(tmp_path / "trainings" / "history" / "rows.jsonl.gz", HISTORY)
    assert history["training"].tolist() == resumed.sort_values("seed", kind="stable")["training"].unique().tolist()
    assert (history["epoch"] == 1).all()
    last = resumed.drop_duplicates("training").set_index("training")
    for line in history.itertuples():
        assert line.train_loss == last.loc[line.training, "train_loss"]
        assert 100 * line.test_accuracy == pytest.approx(last.loc[line.training, "accuracy"])  # gamma 0 comes first


def test_a_shared_variant_is_trained_once(tmp_path, monkeypatch) -> None:
    real, trained = engine.train_and_measure, []

    def noted(config, *arguments):
        trained.append(training_id(config))
        return real(config, *arguments)

    monkeypatch.setattr(engine, "train_and_measure", noted)
    asked = options(tmp_path, seeds=(0,), checkpoints=tmp_path / "weights")
    same = dataclasses.replace(JIGSAWED, name="another table's")
    rows = train_variants([JIGSAWED, same], asked, QUIET)
    assert len(trained) == 1
    assert rows["line"].tolist() == ["J"] * 2 + ["another table's"] * 2
    train_variants([PLAIN, same], dataclasses.replace(asked, resume=True), QUIET)
    assert len(trained) == len(set(trained)) == 2
    kept = {path.name: load_file(path) for path in (tmp_path / "weights").glob("*.safetensors")}
    assert {name: "unk_embed" in state for name, state in kept.items()} == {
        "A-0.safetensors": False,
        "J-0.safetensors": True,
    }


def test_lines_of_a_seed_see_the_same_images_in_the_same_order(tmp_path) -> None:
    """Augmented pixels and labels of an epoch, whatever the defence; another seed sees others."""
    asked = options(tmp_path, recipe=dataclasses.replace(SHORT, batch_size=8, smallest_crop=0.5))

    def seen(variant: Variant, seed: int) -> list[torch.Tensor]:
        """Images and labels of the first epoch."""
        trainer = Trainer(asked.config(variant, seed))
        return [part for batch in trainer.batches.epoch(1, trainer.device) for part in batch]

    plain, jigsawed, other = seen(PLAIN, 0), seen(JIGSAWED, 0), seen(PLAIN, 1)
    assert all(torch.equal(a, b) for a, b in zip(plain, jigsawed, strict=True))
    assert not torch.equal(plain[0], other[0])


def test_tables_without_training(whole, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(engine, "train_and_measure", lambda *_: pytest.fail("trained"))
    with pytest.raises(UsageError, match="holds no trainings; leave out --no-train"):
        train_variants([PLAIN], options(tmp_path, train=False), QUIET)
    assert not (tmp_path / "trainings").exists()
    with RowLog(tmp_path / "trainings" / "rows.jsonl", TRAININGS) as log:
        for row in whole[whole["seed"] == 1].drop(columns="line").to_dict("records"):
            log.append(row)
    rows = train_variants([PLAIN, JIGSAWED], options(tmp_path, train=False), QUIET)
    assert rows["seed"].tolist() == [1] * 4
    with pytest.raises(UsageError, match="holds no training of another"):
        train_variants([Variant("another", "resnet_micro_32")], options(tmp_path, train=False), QUIET)


def test_identity_is_what_decides_about_numbers(tmp_path) -> None:
    base = training_id(options(tmp_path).config(JIGSAWED, 0))
    elsewhere = options(tmp_path / "other", threads=2)
    assert training_id(elsewhere.config(dataclasses.replace(JIGSAWED, name="J2", against=""), 0)) == base
    for line in (PLAIN, dataclasses.replace(JIGSAWED, options={"gamma": 0.4})):
        assert training_id(options(tmp_path).config(line, 0)) != base
    assert training_id(options(tmp_path).config(JIGSAWED, 1)) != base
    longer = options(tmp_path, recipe=dataclasses.replace(SHORT, batch_size=8, epochs=2))
    assert training_id(longer.config(JIGSAWED, 0)) != base


def test_a_variant_is_measured_with_the_positions_it_was_trained_with(tmp_path) -> None:
    asked = options(tmp_path, seeds=(0,))
    kinds = {
        "own": Variant("E", "vit_micro_32", "mjp", {"positions": "own", "dal": "none"}),
        "index": Variant("F", "vit_micro_32", "mjp", {"positions": "index", "dal": "none"}),
    }
    rows = train_variants(list(kinds.values()), asked, QUIET).set_index("line")
    assert rows.loc["E", "positions"].tolist() == ["own"] * 2
    assert rows.loc["F", "positions"].tolist() == ["index"] * 2


@pytest.mark.parametrize(
    ("changes", "line", "words"),
    [
        ({"seeds": ()}, PLAIN, "--seeds"),
        ({"seeds": (1, 1)}, PLAIN, "--seeds"),
        ({"gammas": (0.0, 1.5)}, PLAIN, "--gamma must lie"),
        ({"gammas": (0.0, 0.3)}, PLAIN, "--gammas needs 0"),
        ({}, Variant("x", "vit_micro_32", "mpj"), "choose from"),
        ({}, Variant("x", "vit_micro_32_idx", "mjp"), "--positions unknown"),
        ({}, Variant("x", "vit_huge"), "unknown model"),
        ({"recipe": dataclasses.replace(SHORT, batch_size=7)}, PLAIN, "--batch-size"),
        ({"data": DataConfig("cifar10", Path("nowhere"))}, PLAIN, "nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(changes, line, words, tmp_path) -> None:
    with pytest.raises(UsageError, match=words):
        train_variants([line], options(tmp_path, **changes), QUIET)


def test_folders_are_not_mixed_unasked(tmp_path) -> None:
    (tmp_path / "trainings").mkdir()
    (tmp_path / "trainings" / "rows.jsonl.gz").touch()
    with pytest.raises(UsageError, match="holds trainings already; pass --resume"):
        train_variants([PLAIN], options(tmp_path), QUIET)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table.csv").touch()
    with pytest.raises(UsageError, match="holds a table already; pass --resume"):
        train_variants([PLAIN], options(tmp_path, trainings=tmp_path / "fresh"), QUIET)
