"""The benchmarks of clients that augment and of false matches: views, rows, resumption, mistakes."""

from __future__ import annotations

from pathlib import Path

import augmentation
import pandas as pd
import pytest
import strangers
import torch
from experiments.augmentation.options import NAMES
from experiments.augmentation.render import STRANGERS
from experiments.augmentation.views import AUGMENTATIONS

from fedmjp.records.rows import load_rows

SMALL = ["--num-images", "4", "--updates", "2", "--gammas", "0.1"]


def run(command, out: Path, *options: str) -> int:
    """Exit code of a command line, in this process."""
    try:
        return command.main([*options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("augmentation") / "out"
    assert run(augmentation, out, *SMALL, "--views", "1", "6") == 0
    return out


def test_options_name_every_augmentation_in_order() -> None:
    assert list(NAMES) == list(AUGMENTATIONS)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_views_have_the_photographs_size_and_follow_the_generator(name: str) -> None:
    scene = torch.rand(3, 80, 80, generator=torch.Generator().manual_seed(0))
    first, again, other = (AUGMENTATIONS[name](scene, 8, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert first.shape == (3, 64, 64)
    assert torch.equal(first, again)
    assert name in ("none", "mirrored") or not torch.equal(first, other)


def test_unclipped_colours_are_affine_and_clipped_ones_stay_in_range() -> None:
    scene = torch.rand(3, 80, 80, generator=torch.Generator().manual_seed(0))
    image = AUGMENTATIONS["none"](scene, 8, None).flatten(1).double()
    for name, exact in (("colours", True), ("colours, clipped", False)):
        view = AUGMENTATIONS[name](scene, 8, torch.Generator().manual_seed(0)).flatten(1).double()
        extended = torch.cat([image, torch.ones_like(image[:1])])
        fit = torch.linalg.lstsq(extended.T, view.T).solution
        assert (float((extended.T @ fit - view.T).abs().max()) < 1e-5) == exact
        assert exact or (float(view.min()) >= 0 and float(view.max()) <= 1)


def test_mirrored_updates_are_joined_and_pixel_shifts_are_not(finished) -> None:
    table = pd.read_csv(finished / "table.csv").set_index(["augmentation", "attack", "against"])
    rounds = table.loc[("mirrored", "mjp_rounds", "view")]
    assert rounds.joined_mean == 2
    assert rounds.psnr_median > table.loc[("mirrored", "mjp_subspace", "view"), "psnr_median"] + 10
    assert table.loc[("pixel shifts", "mjp_rounds", "view"), "joined_mean"] < 2
    assert table.loc[("mirrored", "batch_rounds", "view"), "psnr_median"] > 50
    assert set(table["count"]) == {4}


def test_resuming_a_finished_run_adds_nothing(finished) -> None:
    before = len(load_rows(finished / "rows.jsonl.gz"))
    assert run(augmentation, finished, *SMALL, "--views", "1", "6", "--resume") == 0
    assert len(load_rows(finished / "rows.jsonl.gz")) == before


def test_withheld_positions(tmp_path) -> None:
    assert run(augmentation, tmp_path / "out", *SMALL, "--views", "0", "--withhold", "--no-batches") == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert set(table["attack"]) == {"mjp_rounds"}
    assert set(table["joined_mean"]) == {2.0}


def test_different_photographs_are_no_matches(tmp_path) -> None:
    options = ["--images", "photos", "--num-images", "8", "--targets", "5", "--gammas", "0.1"]
    assert run(strangers, tmp_path / "out", *options) == 0
    rows = load_rows(tmp_path / "out" / "rows.jsonl.gz", STRANGERS)
    assert rows["pairs"].tolist() == [7] * 5 + [3] * 4
    assert not rows["joined"].any()
    assert rows["shared"].tolist()[5:] == rows["kept"].tolist()[5:] == [2, 2, 2, 0]


@pytest.mark.parametrize(
    ("options", "message"), [(["--views", "9"], "--views 9"), (["--gammas", "--no-batches"], "nothing to attack")]
)
def test_mistakes(tmp_path, capsys, options, message) -> None:
    assert run(augmentation, tmp_path, *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
