"""The figures: written, as large as they should be, not blank, and tolerant of thin data."""

from __future__ import annotations

import itertools

import matplotlib.image
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy import stats

from attacks import ATTACKS
from fedmjp.defenses import DEFENSES
from fedmjp.metrics.intervals import wilson
from fedmjp.report import (
    Panel,
    Reconstructed,
    figures,
    leakage_by_round_figure,
    reconstructions_figure,
    training_figure,
)
from fedmjp.report.figures import MOST_MARKED, draw_by_round
from fedmjp.report.pictures import _pixels
from fedmjp.report.styles import DEFENCES, SMALL, attack_order, attack_style, label_colour
from tests.records.sample_rows import make_row

pytestmark = pytest.mark.usefixtures("drawn")


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
    assert 1000 < width < 1600  # a label and five cells of 1.2 inches
    assert 200 * count < height <= 880


def test_many_reconstructions_fit_the_width_of_a_page_and_no_name_is_cut(tmp_path, monkeypatch):
    drawn, names = [], ["see_through_gradients", "april_optimisation", "inverting_gradients", "dlg", "idlg", "gradvit"]
    monkeypatch.setattr("fedmjp.report.pictures.save", lambda figure, path, dpi: drawn.append(figure))
    image = np.zeros((3, 4, 4))
    cells = {name: Reconstructed(image, 9.0) for name in names}
    reconstructions_figure([Panel("one", image, image, cells)], tmp_path / "r.png")
    assert drawn[0].get_figwidth() == pytest.approx(7)
    titles = [axes.title for axes in drawn[0].axes]
    assert [title.get_text().strip() for title in titles] == ["original", *names]
    assert {title.get_fontsize() for title in titles} == {SMALL}
    raised = [title.get_text().endswith("\n") for title in titles]
    assert raised == [False, True] * 3 + [False]  # every other name stands a line higher


def test_long_labels_stay_beside_the_pictures(tmp_path, monkeypatch):
    drawn, image = [], np.zeros((3, 4, 4))
    monkeypatch.setattr("fedmjp.report.pictures.save", lambda figure, path, dpi: drawn.append(figure))
    noise = "noise, noise_unit entry, noise_multiplier 0.00003"
    titles = [f"mjp, gamma 0.3 + {noise}, round 1, client 0", f"a_name_of_twenty_letters, {noise}, " * 3, "none"]
    reconstructions_figure([Panel(title, image, image, {"x": Reconstructed(image, 9.0)}) for title in titles], "r.png")
    figure = drawn[0]
    FigureCanvasAgg(figure)
    boxes = [text.get_window_extent() for text in figure.texts]
    cells = [axes.get_window_extent() for axes in figure.axes[::2]]
    for box, cell in zip(boxes, cells, strict=True):
        assert box.x1 < cell.x0
    for above, below in itertools.pairwise(boxes):
        assert above.y0 > below.y1
    assert figure.texts[0].get_text().splitlines()[1:3] == ["gamma 0.3", "+ noise"]


def test_reconstructions_show_the_pixels_they_are_given(tmp_path):
    red = np.zeros((3, 4, 4))
    red[0] = 1
    reconstructions_figure([Panel("one", red, red, {})], tmp_path / "r.png")
    picture = pixels(tmp_path / "r.png")
    share = (picture == [1, 0, 0]).all(axis=-1).sum() / (1.15 * 200) ** 2
    assert share == pytest.approx(1, abs=0.03)  # once: what the model saw is the original


def test_pixels_that_are_not_vouched_for_are_hatched(tmp_path):
    red = np.zeros((3, 4, 4))
    red[0] = 1
    for share in (1.0, 0.5, 0.0):
        known = np.arange(4)[:, None].repeat(4, 1) < 4 * share
        panel = Panel("one", None, None, {"attack": Reconstructed(red, 20.0, known=known)})
        reconstructions_figure([panel], tmp_path / "r.png")
        picture = pixels(tmp_path / "r.png")
        clean = (picture == [1, 0, 0]).all(axis=-1)
        # A quarter of the unvouched half is covered by lines, about as much again by their soft edges.
        assert 0.4 * (1 - share) - 0.05 < 1 - clean.sum() / (1.15 * 200) ** 2 < 0.7 * (1 - share) + 0.03


def test_rows_with_other_attacks_have_headings_of_their_own(tmp_path):
    image = np.ones((3, 4, 4)) / 2
    rows = [
        Panel("a", image, image, {name: Reconstructed(image, 1.0) for name in names}) for names in ("xy", "yz", "yz")
    ]
    reconstructions_figure([*rows], tmp_path / "three.png", dpi=100)
    reconstructions_figure([rows[0], rows[0], rows[0]], tmp_path / "same.png", dpi=100)
    three, same = (pixels(tmp_path / f"{name}.png").shape for name in ("three", "same"))
    assert three[0] == pytest.approx(same[0] + 17, abs=2)  # one more line of headings of 0.17 inches
    assert three[1] == same[1]


def test_panels_may_differ_in_their_attacks(tmp_path):
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


@pytest.mark.parametrize(("rounds", "marked"), [(MOST_MARKED, True), (MOST_MARKED + 1, False)])
def test_many_rounds_are_bands_and_few_are_marked(rounds, marked):
    rows = [make_row(attack="a", round=r, client=c, psnr=20.0 + c) for r in range(rounds) for c in range(2)]
    axes = Figure().subplots()
    draw_by_round(axes, pd.DataFrame(rows), ["a"])
    assert bool(axes.containers) == marked
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [20.5] * rounds)
    if not marked:
        (band,) = axes.collections
        low, high = band.get_paths()[0].get_extents().get_points()[:, 1]
        assert (low, high) == (20.0, 21.0)


def test_training_and_no_global_figures(tmp_path):
    rounds = pd.DataFrame({"defense": ["none", "mjp"], "round": 1, "loss": [1.0, 1.2], "accuracy": [0.5, 0.4]})
    training_figure(rounds, tmp_path / "training.png")
    assert pixels(tmp_path / "training.png").shape[:2] == (600, 1320)
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


def test_at_most_six_attacks_a_panel_and_the_strongest_are_drawn(tmp_path, monkeypatch):
    names = [f"attack{place}" for place in range(9)]
    rows = pd.DataFrame(
        [
            make_row(attack=name, client=c, image_id=str(c), psnr=level + c / 10)
            for level, name in [(10, "mean_image"), *zip(range(20, 29), names, strict=True)]
            for c in range(3)
        ]
    )
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    leakage_by_round_figure(rows, tmp_path / "a.png")
    (axes,) = [axes for axes in drawn[0].axes if axes.has_data()]
    labels = axes.get_legend_handles_labels()[1]
    assert sorted(labels) == ["attack3", "attack4", "attack5", "attack6", "attack7", "attack8", "mean_image"]
    assert "weaker, not drawn: attack2, attack1" in axes.get_xlabel().replace("\n", " ")


def test_every_registered_attack_has_a_style_of_its_own():
    styles = {name: (s["color"], s["marker"], s["ls"]) for name in ATTACKS if (s := attack_style(name))}
    assert len(set(styles.values())) == len(styles)
    assert attack_style("breaching_april")["color"] == attack_style("april")["color"]
    assert attack_style("of another package") == attack_style("of another package")
    assert attack_order(["other_image", "zzz", "unmix", "april"]) == ["april", "unmix", "zzz", "other_image"]


def test_every_registered_defence_has_a_colour_that_darkens_with_its_strength():
    assert set(DEFENSES) <= set(DEFENCES)
    shades = [sum(to_rgb(label_colour(f"mjp:gamma={gamma}"))) for gamma in (0.1, 0.5, 0.9)]
    assert shades == sorted(shades, reverse=True)
    assert label_colour("none") != label_colour("mjp:gamma=0.5") != label_colour("mjp:gamma=0.1")


def test_accuracy_has_the_interval_of_wilson():
    oracle = stats.binomtest(6, 24).proportion_ci(method="wilson")
    low, high = wilson(np.array([0.25]), 24)
    assert (low[0], high[0]) == (pytest.approx(oracle.low, abs=1e-6), pytest.approx(oracle.high, abs=1e-6))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_any_number_of_channels_are_drawn(channels: int) -> None:
    image = np.random.default_rng(0).random((channels, 8, 8))
    shown = _pixels(image)
    assert np.array_equal(shown, image[:3].transpose(1, 2, 0) if channels >= 3 else image[0])
