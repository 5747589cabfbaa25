"""The figures: written, as large as they should be, not blank, and tolerant of thin data."""

from __future__ import annotations

import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
import torch

from fedmjp.report import Panel, Reconstructed, leakage_by_round_figure, reconstructions_figure, training_figure


def make_panel(title: str = "mjp, round 1, client 0") -> Panel:
    image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    made = {
        "closed_form": Reconstructed(image.half(), 61.2),
        "grey": Reconstructed(np.zeros((1, 8, 8), dtype=np.float32), None),
        "april_analytic": Reconstructed(None, None, "the gradient of pos_embed is zero"),
    }
    return Panel(title, image, image.numpy()[:, ::-1], made)


def pixels(path) -> np.ndarray:
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    picture = matplotlib.image.imread(path)[..., :3]
    assert picture.std() > 0.02
    return picture


@pytest.mark.parametrize("count", [1, 3])
def test_reconstructions(tmp_path, count):
    path = tmp_path / "made" / "reconstructions.png"
    reconstructions_figure([make_panel()] * count, path)
    height, width, _ = pixels(path).shape
    assert 1300 < width < 1600  # a label and five cells of 1.2 inches at 200 dpi
    assert 200 * count < height < 400 * count


def test_reconstructions_show_the_pixels_they_are_given(tmp_path):
    red = np.zeros((3, 4, 4))
    red[0] = 1
    reconstructions_figure([Panel("one", red, red, {})], tmp_path / "r.png")
    picture = pixels(tmp_path / "r.png")
    share = (picture == [1, 0, 0]).all(axis=-1).sum() / (2 * (1.15 * 200) ** 2)
    assert share == pytest.approx(1, abs=0.03)


def test_panels_lacking_an_attack_leave_a_hole(tmp_path):
    bare = Panel("none", np.ones((3, 4, 4)), np.ones((3, 4, 4)), {"other": Reconstructed(None, None)})
    reconstructions_figure([make_panel(), bare], tmp_path / "r.png")
    pixels(tmp_path / "r.png")


@pytest.mark.parametrize("count", [0, 13])
def test_too_few_or_too_many_panels(tmp_path, count):
    with pytest.raises(ValueError, match="1 to 12 panels"):
        reconstructions_figure([make_panel()] * count, tmp_path / "r.png")


def test_wrong_image_shape(tmp_path):
    with pytest.raises(ValueError, match="an image is"):
        reconstructions_figure([Panel("one", np.ones((4, 4, 3)), np.ones((3, 4, 4)))], tmp_path / "r.png")


@pytest.mark.parametrize("keep", ["all rounds", "one round", "no metric", "one row"])
def test_leakage_by_round(tmp_path, frame, keep):
    rows = {
        "all rounds": frame,
        "one round": frame[frame["round"] == 1],
        "no metric": frame[frame["psnr"].isna()],
        "one row": frame.head(1),
    }[keep]
    leakage_by_round_figure(rows, tmp_path / "leakage.png")
    height, width, _ = pixels(tmp_path / "leakage.png").shape
    assert 600 < height < 900
    assert 900 < width < 1300


def test_training_and_no_global_figures(tmp_path):
    rounds = pd.DataFrame({"defense": ["none", "mjp"], "round": 1, "loss": [1.0, 1.2], "accuracy": [0.5, 0.4]})
    training_figure(rounds, tmp_path / "training.png")
    assert pixels(tmp_path / "training.png").shape[:2] == (560, 1320)
    assert matplotlib.pyplot.get_fignums() == []


def test_nothing_to_draw(tmp_path, frame):
    with pytest.raises(ValueError, match="at least one"):
        leakage_by_round_figure(frame.iloc[:0], tmp_path / "a.png")
    with pytest.raises(ValueError, match="at least one"):
        training_figure(pd.DataFrame({"round": []}), tmp_path / "a.png")


def test_equal_data_gives_equal_files(tmp_path, frame):
    for name in ("a", "b"):
        reconstructions_figure([make_panel()], tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()
