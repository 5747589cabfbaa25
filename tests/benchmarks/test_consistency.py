"""Consistency under jigsaws: what must hold for any weights, and the script as a user meets it."""

from __future__ import annotations

from pathlib import Path

import consistency as command
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES, ClientInput
from fedmjp.evaluation.accuracy import evaluate
from fedmjp.evaluation.consistency import embed_and_predict, measure, summarise
from fedmjp.models import BuiltModel, build_model

CPU = torch.device("cpu")


def found_by(built: BuiltModel, images) -> pd.DataFrame:
    return summarise(measured(built, images))


def measured(built: BuiltModel, images) -> pd.DataFrame:
    return measure(built, images, (0.0, 0.5), seed=0, device=CPU)


@pytest.fixture(scope="module")
def images():
    return load_data("photos", size=64, test_limit=12).test


def with_strong_positions(name: str) -> BuiltModel:
    """Random weights with position embeddings as large as patch embeddings, and a head that tells images apart."""
    built = build_model(name, num_classes=8, weights="random")
    with torch.no_grad():
        for part in ("pos_embed", "unk_embed"):
            if getattr(built.module, part, None) is not None:
                getattr(built.module, part).mul_(50)
        built.module.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return built


def test_without_positions_a_jigsaw_changes_nothing(images) -> None:
    built = with_strong_positions("vit_mini_64_nope")
    found = found_by(built, images)
    assert found["consistency"].tolist() == [100, 100]
    assert found["diff_share"].max() < 1e-8


def test_positions_make_a_difference(images) -> None:
    found = found_by(with_strong_positions("vit_mini_64"), images)
    found = found.set_index("gamma")
    assert found.loc[0.0, "diff_norm"] == 0
    assert found.loc[0.0, "consistency"] == 100
    assert found.loc[0.5, "diff_share"] > 1e-5


def test_unknown_positions_are_seen_by_mjp_models_only(images) -> None:
    built = with_strong_positions("vit_mini_64_mjp")
    found = found_by(built, images).set_index(["positions", "gamma"])
    assert found.loc[("unknown", 0.5), "diff_norm"] != found.loc[("own", 0.5), "diff_norm"]
    assert found.loc[("unknown", 0.0), "diff_norm"] == 0


def test_numbers_by_hand(images) -> None:
    """Accuracy without a jigsaw is the evaluation's; the spread is the mean over all pairs."""
    built = with_strong_positions("vit_mini_64")
    frame = measured(built, images)
    plain = frame[frame["gamma"] == 0]
    assert plain["right"].mean() == pytest.approx(evaluate(built, images, CPU)[1])
    embeddings = embed_and_predict(built, ClientInput(images.images(range(12))))[0].double()
    pairs = [(embeddings[i] - embeddings[j]).square().sum() for i in range(12) for j in range(12) if i != j]
    assert frame["spread"].iloc[0] == pytest.approx(float(torch.stack(pairs).mean()), rel=1e-4)


def test_diff_norm_with_and_without_the_square(images) -> None:
    """The mean of |F(x) - F(x~)| as the released script takes it, one image at a time, and of its square."""
    built, jigsaw = with_strong_positions("vit_mini_64"), DEFENSES.get("mjp")(gamma=0.5, positions="own")
    line = summarise(measure(built, images, [0.5], seed=3, device=CPU)).iloc[0]
    pictures = images.images(range(len(images)))
    moved = jigsaw.on_input(pictures, built, torch.Generator().manual_seed(3), 1).images
    norms = []
    for before, after in zip(pictures, moved, strict=True):
        first, second = (embed_and_predict(built, ClientInput(x[None]))[0] for x in (before, after))
        norms.append((first - second).norm().item())
    assert line["diff_norm_root"] == pytest.approx(np.mean(norms), rel=1e-3)
    assert line["diff_norm"] == pytest.approx(np.mean(np.square(norms)), rel=1e-3)
    assert line["diff_norm_root_low"] <= line["diff_norm_root"] <= line["diff_norm_root_high"]


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / f"{name}.safetensors"
    save_file(with_strong_positions(name).module.state_dict(), path)
    return path


def test_table_and_figure(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedmjp.records.provenance.commit", lambda: "9584047")  # digits alone, as one in 27 is
    out = tmp_path / "out"
    entry = f"vit_mini_64_mjp={checkpoint(tmp_path, 'vit_mini_64_mjp')}"
    options = ["--data", "photos", "--num-images", "6", "--gammas", "0", "0.5", "--out", str(out)]
    assert command.main(["--model", entry, *options]) == 0
    assert (out / "consistency.png").exists()
    assert (out / "run.json").exists()
    found = pd.read_csv(out / "table.csv")
    ours = found[found["source"] == "measured"]
    assert ours["positions"].tolist() == ["unknown", "own"] * 2
    measured = [f"{name}_mean" for name in ("accuracy", "diff_norm", "diff_norm_root", "diff_share", "consistency")]
    assert np.isfinite(ours[measured].to_numpy()).all()
    assert (found["source"] == "paper, Table 1").sum() == 6
    other = f"vit_mini_64={checkpoint(tmp_path, 'vit_mini_64')}"
    assert command.main(["--model", other, *options]) == 2
    assert command.main(["--model", other, *options, "--resume"]) == 0
    more = pd.read_csv(out / "table.csv")
    pd.testing.assert_frame_equal(more[more["model"] == "vit_mini_64_mjp"], ours[more.columns])
    assert len(more) == len(found) + 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "vit_b"], "no trained weights of vit_b"),
        (["--model", "vit_mini_64=random"], "no trained weights"),
        (["--model", "vit_mini_64=FILE", "vit_mini_64=b.safetensors"], "one training at a time here, not 2"),
        (["--gammas", "1.5"], "gamma must lie in"),
        (["--model", "vit_mini_64=FILE", "--data", "photos"], "are for 5 classes"),
    ],
)
def test_mistakes_end_in_one_line(options, words, tmp_path, capsys) -> None:
    path = tmp_path / "five.safetensors"
    save_file(build_model("vit_mini_64", num_classes=5, weights="random").module.state_dict(), path)
    options = [o.replace("FILE", str(path)) for o in options]
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
