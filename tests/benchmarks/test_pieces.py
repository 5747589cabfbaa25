"""The benchmark of patches up to their order: scores against permutations, rows, resumption, mistakes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pandas as pd
import pieces
import pytest
import torch
from experiments.pieces.protocol import score
from experiments.pieces.render import SCHEMA

from attacks import find_tokenizer
from fedmjp.models import build_model
from fedmjp.records.rows import load_rows


def run(out: Path, *options: str) -> int:
    """Exit code of a command line, in this process."""
    try:
        return pieces.main([*options, "--out", str(out)])
    except SystemExit as stop:  # the parser leaves this way
        return int(stop.code)


@pytest.fixture(scope="module")
def tokenizer():
    return find_tokenizer(build_model("vit_micro16_32", num_classes=4, weights="random").module, (3, 32, 32))


def test_scores_up_to_order_are_those_of_the_best_permutation(tokenizer) -> None:
    generator = torch.Generator().manual_seed(0)
    original = torch.rand(1, 3, 32, 32, generator=generator)
    noise = 0.02 * torch.randn(4, tokenizer.patch_dim, generator=generator)
    patches = tokenizer.patchify(original)[0]
    hidden = torch.tensor([True, False, True, True])
    moved = patches[[3, 1, 0, 2]] + noise
    found = score(tokenizer.unpatchify(moved[None]), original, hidden, tokenizer)

    def psnr(order: tuple[int, ...]) -> float:
        return float(-10 * (moved[list(order)].double() - patches.double()).square().mean().log10())

    best = max(psnr(order) for order in permutations(range(4)) if order[1] == 1)
    assert found["psnr_unordered"] == pytest.approx(best, abs=1e-3)
    assert found["psnr"] == pytest.approx(psnr((0, 1, 2, 3)), abs=1e-3)
    assert found["right"] == 1.0
    assert score(tokenizer.unpatchify(moved[None]), original, hidden & False, tokenizer)["right"] == 0.25


def test_no_answer_has_no_scores(tokenizer) -> None:
    scores = score(None, torch.zeros(1, 3, 32, 32), torch.zeros(4, dtype=torch.bool), tokenizer)
    assert all(value != value for value in scores.values())


def test_one_photograph_and_resumption(tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--num-images", "1", "--gammas", "0.5", "--no-without-positions"]
    assert run(out, *options) == 0
    before = load_rows(out / "rows.jsonl.gz", SCHEMA)
    table = pd.read_csv(out / "table.csv")
    assert table["right_median"].item() > 0.9
    assert table["hidden_median"].item() == 32
    assert run(out, *options) == 2  # rows are there, and --resume is not
    assert run(out, *options, "--resume") == 0
    assert run(out, *options, "--resume", "--seed", "1") == 2  # before anything is attacked
    assert len(load_rows(out / "rows.jsonl.gz", SCHEMA)) == len(before) == 1


@pytest.mark.long  # as tests/attacks/mjp/test_unmix.py without position gradient
def test_the_mask_is_found_where_position_rows_are_withheld(tmp_path) -> None:
    options = ["--num-images", "1", "--gammas", "0.9", "--no-without-positions", "--model", "vit_mini_32"]
    assert run(tmp_path / "out", *options, "--withhold-positions") == 0
    assert run(tmp_path / "out", *options, "--resume") == 0
    table = pd.read_csv(tmp_path / "out" / "table.csv", keep_default_na=False)
    assert table["withheld"].tolist() == ["position embedding", ""]
    assert table["right_median"].min() > 0.9
    assert (table["hidden_median"] == 58).all()


def test_a_model_at_another_size_has_as_many_patches(tmp_path) -> None:
    options = ["--num-images", "1", "--gammas", "0.5", "--model", "vit_micro16_32", "--image-size", "48"]
    assert run(tmp_path / "out", *options) == 0
    rows = load_rows(tmp_path / "out" / "rows.jsonl.gz", SCHEMA).set_index("model")
    assert rows.loc["vit_micro16_32_nope, 48 px", "hidden"] == 9
    assert rows.loc["vit_micro16_32_mjp, 48 px", "hidden"] in (4, 5)


def test_mistakes_are_named(tmp_path, capsys) -> None:
    assert run(tmp_path / "a", "--gammas", "--no-without-positions") == 2
    assert "nothing to attack" in capsys.readouterr().err
    assert run(tmp_path / "b", "--num-images", "0") == 2
