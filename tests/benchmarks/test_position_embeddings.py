"""Position embeddings with known answers, and the script as a user meets it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import position_embeddings as command
import pytest
import torch
from experiments.trained_models import options, position_embeddings
from experiments.trained_models.render import position_block
from safetensors.torch import save_file

from fedmjp.models import build_model

GRID = (8, 8)


def test_explained_variance_of_embeddings_on_three_axes() -> None:
    generator = np.random.default_rng(0)
    axes = np.linalg.qr(generator.normal(size=(16, 3)))[0].T  # (3, 16), orthonormal
    weights = np.linalg.qr(generator.normal(size=(64, 4)) * [0, 1, 1, 1] + [1, 0, 0, 0])[0][:, 1:]  # centred columns
    shares = position_embeddings.explained_variance(weights * [3.0, 2.0, 1.0] @ axes + 5.0)
    assert shares[:3] == pytest.approx([9 / 14, 13 / 14, 1.0])
    assert len(shares) == 16


def test_places_are_in_raster_order() -> None:
    assert position_embeddings.places_of((2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_embeddings_linear_in_the_place_are_read_exactly() -> None:
    places = position_embeddings.places_of(GRID)
    values = places @ np.random.default_rng(1).normal(size=(2, 192)) + 0.3
    error = position_embeddings.held_out_error(values, places, np.random.default_rng(0))
    assert error == pytest.approx(0, abs=1e-9)


def test_held_out_places_are_not_fitted() -> None:
    """With more channels than places a map fits any places; on those left out it must then be no better than chance."""
    places = position_embeddings.places_of(GRID)
    values = np.random.default_rng(1).normal(size=(64, 192))
    guess = np.abs(places - places.mean(axis=0)).mean()
    assert position_embeddings.held_out_error(values, places, np.random.default_rng(0)) > 0.9 * guess


@pytest.mark.parametrize("columns", [[0], [0, 1]], ids=["one target", "two targets"])
def test_equals_normal_equations(columns) -> None:
    """Held-out errors against a solve by NumPy alone: the pseudo-inverse of the centred rows of the other folds."""
    generator = np.random.default_rng(2)
    places = position_embeddings.places_of(GRID)[:, columns]
    values = generator.normal(size=(64, 192))
    values[:, 0] = 20 * places[:, 0]  # so strong that a map of least norm finds it
    errors = []
    order = np.random.default_rng(0).permutation(64)
    for part in np.array_split(order, 5):
        rest = np.setdiff1d(order, part)
        centre, middle = values[rest].mean(axis=0), places[rest].mean(axis=0)
        fitted = np.linalg.pinv(values[rest] - centre) @ (places[rest] - middle)
        errors.append(np.abs((values[part] - centre) @ fitted + middle - places[part]))
    ours = position_embeddings.held_out_error(values, places, np.random.default_rng(0))
    assert ours == pytest.approx(np.concatenate(errors).mean(), rel=1e-9)


def test_ridge_equals_leaving_places_out_by_hand() -> None:
    """The penalty with the least leave-one-out error, residual / (1 - leverage), then the ridge map; one target."""
    generator = np.random.default_rng(3)
    target = np.arange(64.0)[:, None]
    values = generator.normal(size=(64, 192))
    values[:, :1] += 0.3 * target
    scale = ((values - values.mean(axis=0)) ** 2).sum(axis=1).mean()
    errors = []
    order = np.random.default_rng(0).permutation(64)
    for part in np.array_split(order, 5):
        rest = np.setdiff1d(order, part)
        centre, middle = values[rest].mean(axis=0), target[rest].mean(axis=0)
        inner, wanted = values[rest] - centre, target[rest] - middle
        best = (np.inf, None)
        for penalty in position_embeddings.PENALTIES * scale:
            fitted = inner.T @ np.linalg.solve(inner @ inner.T + penalty * np.eye(len(rest)), wanted)
            hat = inner @ np.linalg.solve(inner.T @ inner + penalty * np.eye(192), inner.T)
            left_out = (wanted - inner @ fitted) / (1 - 1 / len(rest) - np.diag(hat))[:, None]
            best = min(best, ((left_out**2).mean(), fitted), key=lambda pair: pair[0])
        errors.append(np.abs((values[part] - centre) @ best[1] + middle - target[part]))
    ours = position_embeddings.held_out_error(values, target, np.random.default_rng(0), penalised=True)
    assert ours == pytest.approx(np.concatenate(errors).mean(), rel=1e-6)


def test_umap_needs_its_package(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "umap" else name)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert "needs umap-learn; pip install" in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_umap_keeps_neighbours_and_is_fixed_by_its_seed(monkeypatch) -> None:
    # Compiling its loops takes longer than running them on few points.
    monkeypatch.setattr(pytest.importorskip("numba").config, "DISABLE_JIT", True)
    places = position_embeddings.places_of(GRID)
    values = places @ np.random.default_rng(1).normal(size=(2, 192))
    plane = position_embeddings.project(values, "umap", 0)  # (64, 2)
    assert np.array_equal(plane, position_embeddings.project(values, "umap", 0))
    apart = np.linalg.norm(plane[:, None] - plane[None], axis=-1)
    near = np.linalg.norm(places[:, None] - places[None], axis=-1) == 1
    assert apart[near].mean() < 0.5 * apart[~near].mean()


@pytest.fixture
def checkpoint(tmp_path):
    """A model whose position embeddings are a plane grid."""
    built = build_model("vit_mini_64", num_classes=5, weights="random")
    places = torch.tensor(position_embeddings.places_of(GRID)).float()
    with torch.no_grad():
        built.module.pos_embed[0, 1:] = places @ torch.randn(2, 192, generator=torch.Generator().manual_seed(0))
    save_file(built.module.state_dict(), tmp_path / "grid.safetensors")
    return tmp_path / "grid.safetensors"


def test_a_model_of_another_size_has_fewer_places(checkpoint) -> None:
    found = position_embeddings.load(options.PositionOptions(image_size=32), "vit_mini_64", str(checkpoint))
    assert found.grid == (4, 4)
    assert found.values.shape == (16, 192)
    assert np.linalg.matrix_rank(found.values - found.values.mean(axis=0), tol=1e-4) == 2  # still a plane


def test_tables_and_figures(checkpoint, tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--projections", "pca", "--shuffles", "3", "--out", str(out)]
    assert command.main(["--model", f"vit_mini_64={checkpoint}", *options]) == 0
    assert (out / "run.json").exists()
    assert {p.name for p in out.iterdir()} >= {"eigenvalues.png", "projections.png"}
    variance = pd.read_csv(out / "explained_variance.csv")
    grid = variance[variance["weights"] == "grid.safetensors"].set_index("dimension")["explained_variance"]
    assert grid[2] == pytest.approx(100)
    assert (variance["source"] == "paper, Table 7").sum() == 8
    errors = pd.read_csv(out / "regression.csv").set_index("weights")
    assert errors.loc["grid.safetensors", "mae_2d_mean"] < 1e-3
    assert errors.loc["random (seed 0), NOT TRAINED", "mae_2d_mean"] > 1.5


def test_means_over_trainings(tmp_path) -> None:
    """Three pairs of embeddings of which the second has less variance in the first components: as in the paper."""
    entries = []
    for name, spread in (("vit_mini_64", 0.01), ("vit_mini_64_mjp", 0.5)):
        for seed in range(3):
            built, draw = build_model(name, num_classes=5, weights="random"), torch.Generator().manual_seed(seed)
            places = torch.tensor(position_embeddings.places_of(GRID)).float()
            with torch.no_grad():
                grid = places @ torch.randn(2, 192, generator=draw)
                built.module.pos_embed[0, 1:] = grid + spread * torch.randn(64, 192, generator=draw)
            save_file(built.module.state_dict(), tmp_path / f"{name}-{seed}.safetensors")
            entries.append(f"{name}={tmp_path / name}-{seed}.safetensors")
    out = tmp_path / "out"
    few = ["--projections", "pca", "--shuffles", "2", "--out", str(out)]
    assert command.main(["--model", *entries, *few]) == 0
    variance = pd.read_csv(out / "explained_variance.csv")
    means = pd.read_csv(out / "over_trainings.csv", keep_default_na=False).set_index(["model", "measure"])
    each = variance[(variance["dimension"] == 3) & (variance["source"] == "measured")].set_index("weights")
    gaps = [
        each.loc[f"vit_mini_64_mjp-{s}.safetensors", "explained_variance"]
        - each.loc[f"vit_mini_64-{s}.safetensors", "explained_variance"]
        for s in range(3)
    ]
    line = means.loc[("vit_mini_64_mjp", "first 3")]
    assert float(line["difference_mean"]) == pytest.approx(np.mean(gaps), rel=1e-4)
    assert float(line["paper_difference"]) == pytest.approx(46.74 - 54.61, rel=1e-4)
    assert line["verdict"] == "agrees"
    assert means.loc[("vit_mini_64_mjp", "1-D error"), "verdict"] == "agrees"  # noise makes places harder to read
    assert means.loc[("vit_mini_64_mjp", "first 1"), "verdict"] == ""  # the paper's Table 7 begins at three
    block = position_block(out)
    assert "`vit_mini_64_mjp`, vit_mini_64_mjp-2" in block
    assert "6 signs were tested together" in block


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "vit_mini_64_nope=FILE"], "no position embeddings"),
        (["--model", "vit_b"], "no trained weights of vit_b"),
        (["--model", "vit_x"], "unknown model"),
        (["--shuffles", "0"], "take numbers from 1"),
        (["--projections", "tsne"], "choose from: pca, umap"),
    ],
)
def test_mistakes_end_in_one_line(options, words, checkpoint, tmp_path, capsys) -> None:
    options = [o.replace("FILE", str(checkpoint)) for o in options]
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
