"""The table of noise and its bound: what is repeated is what was sent, and the bound says what it should."""

from __future__ import annotations

from pathlib import Path

import noise
import numpy as np
import pandas as pd
import pytest
from experiments.noise.bounds import repeated
from experiments.noise.options import Options
from experiments.rendering import read_rows

from fedmjp.cli import split_commas

WEAK, STRONG = "noise:noise_unit=entry,noise_multiplier=1e-3", "dp_sgd:dp_noise_multiplier=1e-3"
SMALL = ["--clients", "2", "--updates", "1", "2", "--attacks", "patch_embedding", "--threads", "1"]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Folder of a table of two federations of two clients."""
    out = tmp_path_factory.mktemp("noise")
    assert noise.main([*SMALL, "--defenses", WEAK, STRONG, "--out", str(out)]) == 0
    return out


def test_the_federation_is_repeated_as_it_ran(table: Path) -> None:
    """The norms of its messages are those that the server saw, also after a step of the weights.

    Of weak noise alone they are not: the audit undoes the clip, which the classifier's gradient shows.
    """
    rows = read_rows(table)
    seen = rows[(rows["defense"] == STRONG) & (rows["attack"] == "patch_embedding")]
    seen = seen.set_index(["round", "client"])["gradient_norm"]
    options = Options(clients=2, updates=(1, 2), attacks=("patch_embedding",), threads=1, out=table)
    again = {(update.round, update.client): update for update in repeated(options.federation(STRONG))}
    assert len(again) == len(seen) == 4
    assert all(again[place].norm == pytest.approx(norm, rel=1e-9) for place, norm in seen.items())
    assert [update.deviation for update in again.values()] == pytest.approx([1e-3] * 4, rel=5e-3)  # sigma C


def test_bounds_stand_beside_what_was_measured(table: Path) -> None:
    bounds = pd.read_csv(table / "bounds.csv")
    assert len(bounds) == 8
    assert (bounds["psnr_unbiased"] < bounds["psnr_normal"]).all()  # pixels of bounded variance are easier
    one, two = (bounds[bounds["round"] == number].set_index(["defense", "client"]) for number in (1, 2))
    assert (two["psnr_unbiased"] > one["psnr_unbiased"]).all()
    lines = pd.read_csv(table / "table.csv")
    for key, own in bounds.groupby(["defense", "round"]):
        line = lines[(lines["defense"] == key[0]) & (lines["round"] == key[1])]
        assert np.allclose(line["psnr_unbiased_median"], own["psnr_unbiased"].median(), atol=0.05)


@pytest.mark.long
def test_under_masks_no_bound_is_stated(tmp_path, capsys) -> None:
    masked = f"mjp:gamma=0.1+{WEAK}"
    options = ["--attacks", "noisy_rounds", "--clients", "1", "--updates", "2", "--threads", "1"]
    assert noise.main([*options, "--defenses", masked, "--out", str(tmp_path)]) == 0
    assert "bound, " not in capsys.readouterr().out
    rows = read_rows(tmp_path)
    assert rows[rows["attack"] == "noisy_rounds"]["psnr"].notna().all()


def test_commas_part_defences_and_not_their_settings() -> None:
    given = split_commas(Options(defenses=(f"{WEAK},{STRONG}", "noise,dp_sgd:dp_epsilon=8"), attacks=("a,b",)))
    assert given.defenses == (WEAK, STRONG, "noise", "dp_sgd:dp_epsilon=8")
    assert given.attacks == ("a", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--defenses", "mjp"], "--defenses takes settings of noise and dp_sgd, alone or after mjp, not 'mjp'"),
        (["--defenses", "noise+mjp"], "noise and dp_sgd, alone or after mjp, not 'noise+mjp'"),
        (["--defenses", "dp_sgd:dp_epsilon=-1"], "--dp-epsilon must lie above 0"),
        (["--updates", "0"], "--updates must be at least 1"),
        (["--attacks", "nosy_rounds"], "noisy_rounds"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str, tmp_path, capsys) -> None:
    assert noise.main([*options, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
    assert not (tmp_path / "out").exists()
