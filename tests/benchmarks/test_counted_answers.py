"""Tables say over how many images a median is where an attack left some unanswered, and count images under one seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from experiments import rendering
from experiments.batches.render import batch_block
from experiments.calibration.render import CALIBRATION
from experiments.message_precision.render import MESSAGE_PRECISION
from experiments.noise.render import MASKED_TABLE, noise_block
from experiments.pieces.render import PIECES
from experiments.placement.render import PLACEMENT
from experiments.recipes.render import RECIPE_TABLE, attack_block
from experiments.rendering import Rendering, read_rows, spread_table
from experiments.scaffold import RESULTS
from experiments.simulate.render import rounds_block

from attacks.registry import UsageError

MJP = "mjp:gamma=0.1+noise:noise_unit=entry,noise_multiplier=1e-2"


def answers(*psnr: float, seeds: int = 1) -> pd.DataFrame:
    """Rows of as many images as numbers (dB), NaN for no answer, the same under each seed."""
    return pd.DataFrame(
        {"attack": "unmix", "defense": "none", "round": 1, "image_id": str(number), "image": 0, "seed": seed}
        | {"psnr": value, "seconds": 1.0, "model": "m", "weights": "w", "setting": "plain", "batch_size": 2}
        for seed in range(seeds)
        for number, value in enumerate(psnr)
    )


@pytest.mark.parametrize("seeds", [1, 3])
def test_images_without_an_answer_are_counted_and_are_not_above(seeds: int) -> None:
    line = spread_table(answers(26.0, np.nan, 30.0, np.nan, 10.0, seeds=seeds), ["attack"]).iloc[0]
    assert (line["count"], line["failed"], line["psnr_median"]) == (5, 2, 26.0)
    assert line["psnr_share_recognisable"] == pytest.approx(2 / 5)
    nothing = spread_table(answers(np.nan, np.nan, seeds=seeds), ["attack"]).iloc[0]
    assert (nothing["count"], nothing["failed"], nothing["psnr_share_recognisable"]) == (2, 2, 0)


def test_an_image_with_an_answer_under_one_seed_is_answered() -> None:
    rows = answers(26.0, 30.0, seeds=2)
    rows.loc[0, "psnr"] = np.nan
    assert spread_table(rows, ["attack"]).iloc[0]["failed"] == 0


def test_blocks_name_the_images_that_a_median_is_over(tmp_path: Path) -> None:
    rows = answers(26.0, np.nan, 30.0, np.nan, 10.0)
    spread_table(rows, ["defense", "round", "attack"]).to_csv(tmp_path / "table.csv", index=False)
    assert "| none | 1 | `unmix` | 26.0 (3 of 5) | 2 of 5 |" in rounds_block(tmp_path)
    by = ["model", "weights", "setting", "round", "batch_size", "attack"]
    spread_table(rows, by).to_csv(tmp_path / "table.csv", index=False)
    assert "| 26.0 (3 of 5) |" in batch_block(tmp_path)
    assert "| 40% | 5 |" in batch_block(tmp_path)


def test_the_committed_table_of_noise_after_mjp_names_them() -> None:
    rows = read_rows(RESULTS / MASKED_TABLE.folder)
    own = rows.query("defense == @MJP and round == 1 and attack == 'unmix'")
    found = own["psnr"].dropna()
    assert (len(found), len(own)) == (4, 8)
    lines = noise_block(RESULTS / MASKED_TABLE.folder).splitlines()
    (line,) = (line for line in lines if "gamma 0.1" in line and "1e-2 | 1 |" in line)
    assert f"| {found.median():.1f} (4 of 8) |" in line


def test_the_committed_recipes_name_them() -> None:
    lines = attack_block(RESULTS / RECIPE_TABLE.folder).splitlines()
    marked = [line for line in lines if "(7 of 16)" in line or "(8 of 16)" in line]
    assert [line.split("|")[1].strip() for line in marked] == ["2 local steps", "FedProx in 2 local steps"] * 2


@pytest.mark.parametrize("table", [CALIBRATION, MESSAGE_PRECISION, PIECES, PLACEMENT], ids=lambda table: table.folder)
def test_images_under_another_seed_are_no_more_images(table: Rendering, monkeypatch) -> None:
    def doubled(folder: Path, schema) -> pd.DataFrame:
        rows = read_rows(folder, schema)
        return pd.concat([rows, rows.assign(seed=1)], ignore_index=True)

    folder = RESULTS / table.folder
    monkeypatch.setattr(rendering, "read_rows", doubled)
    with pytest.raises(UsageError, match="counts images under one seed, not 0 and 1; give each seed a folder of its"):
        table.files(folder)
