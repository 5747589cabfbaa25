"""The benchmark of pieces put back in their places: scores by hand, rows, resumption, mistakes."""

from __future__ import annotations

import math
from pathlib import Path

import border_mixture
import pandas as pd
import piece_predictor
import placement
import pytest
import torch
from experiments.piece_predictor.protocol import shown_in
from experiments.placement.options import Options
from experiments.placement.protocol import cut, degrade, joined
from experiments.placement.render import SCHEMA, placement_block

from attacks.mjp.placement import Placement
from fedmjp.records.rows import load_rows
from tests.conftest import photographs


def run(out: Path, *options: str) -> int:
    """Exit code of a command line, in this process."""
    try:
        return placement.main([*options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


def test_pieces_and_noise_are_what_they_say() -> None:
    image = torch.rand(3, 8, 12, dtype=torch.float64)
    pieces = cut(image, 4)
    assert torch.equal(pieces[4], image[:, 4:, 4:8])
    noisy = degrade(pieces, 17.0, torch.Generator().manual_seed(0))
    assert float(-10 * (noisy - pieces).square().mean().log10()) == pytest.approx(17.0)
    assert torch.equal(degrade(pieces, math.inf, torch.Generator()), pieces)


def test_neighbours_are_counted_where_something_was_hidden() -> None:
    hidden = torch.tensor([[True, True, False], [True, True, False]])
    # 0 1 are side by side, 4 is right of 3; 2 is not right of 4 though 4 + 1 would be, and no column is whole.
    found = torch.tensor([[3, 4, 2], [0, 1, 5]])
    assert joined(found, hidden) == pytest.approx(2 / 6)
    assert joined(torch.arange(6).view(2, 3), hidden) == 1.0
    wrapped = torch.tensor([[1, 2, 3], [4, 5, 0]])
    assert joined(wrapped, torch.ones(2, 3, dtype=torch.bool)) == pytest.approx(4 / 7)


def test_one_photograph_and_resumption(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    options = ["--num-images", "1", "--gammas", "0.3", "--levels", "20", "inf"]
    assert run(out, *options) == 0
    rows = load_rows(out / "rows.jsonl.gz", SCHEMA)
    assert len(rows) == 6
    assert (rows["psnr"] <= rows["level"] + 1e-6).all()
    table = pd.read_csv(out / "table.csv")
    assert list(table["solver"]) == ["border", "learned", "both"] * 2
    assert table["difference_mean"].isna().sum() == 2
    assert run(out, *options, "--resume") == 0
    assert len(load_rows(out / "rows.jsonl.gz", SCHEMA)) == 6
    assert "| 64 of 8 pixels | 30% | exact |" in placement_block(out)
    assert run(out, *options, "--resume", "--seed", "1") == 2
    assert "under one seed, not 0 and 1; give each seed a folder" in " ".join(capsys.readouterr().err.split())
    assert len(load_rows(out / "rows.jsonl.gz", SCHEMA)) == 6


def test_the_table_proposes_as_many_arrangements_as_the_attacks() -> None:
    assert Options().restarts == Placement().restarts


def test_images_that_were_rescaled_and_brightened_are_recognised() -> None:
    images = (255 * photographs(64, 4)).to(torch.uint8)
    smaller = torch.nn.functional.interpolate(images[1:2].float(), (48, 48), mode="bilinear", antialias=True)
    other = (0.8 * torch.nn.functional.interpolate(smaller, (64, 64), mode="bilinear") + 20).to(torch.uint8)
    assert shown_in(images, other).tolist() == [False, True, False, False]


def test_mistakes_are_named(tmp_path, capsys) -> None:
    for options, message in (
        (["--patch-size", "7"], "--image-size 64 is no multiple of --patch-size 7"),
        (["--gammas", "0"], "--gammas must lie in (0, 1]"),
        (["--levels", "-3"], "--levels are PSNR above 0 dB"),
    ):
        assert run(tmp_path / "a", *options) == 2
        assert message in capsys.readouterr().err
    for options, message in (
        (["--width", "20"], "a multiple of 16"),
        (["--out", "x.pt"], "must end in .safetensors"),
        (["--start", "x.safetensors", "--out", "x.safetensors"], "would be overwritten"),
        (["--start", "x.safetensors"], "x.safetensors"),
    ):
        assert piece_predictor.main(options) == 2
        assert message in capsys.readouterr().err
    assert border_mixture.main(["--components", "0"]) == 2
    assert "--components must be at least 1" in capsys.readouterr().err
