"""The leakage table: who stands where, whose figures stand beside whom."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from experiments.leakage.condition import condition_figure
from experiments.leakage.protocol import strongest_first
from experiments.leakage.render import LEAKAGE
from experiments.leakage.table import (
    labelled,
    leakage_latex,
    leakage_markdown,
    leakage_table,
    leakage_text,
)
from rich.console import Console

from attacks.registry import UsageError
from fedmjp.records.rows import METRICS, RowLog
from tests.records.sample_rows import make_row

USUAL = ["model_weights", "position_gradient", "several_rounds"]
PAPER = pd.DataFrame(
    [["m", "a", 70.0, 0.03, 0.004, 19.0, 0.5, 0.3], ["m_nope", "a", 69.0, 0.04, 0.005, 20.0, 0.6, 0.2]],
    columns=["model", "setting", "accuracy", "mse", "fft2d_official", "psnr", "ssim", "lpips"],
)


def row(model: str, block: str, attack: str, setting: str, image: int, psnr: float | None, **changes) -> dict:
    weights = changes.pop("weights", "random (seed 0), NOT TRAINED")
    scores = dict.fromkeys(METRICS) if psnr is None else {"psnr": psnr, "lpips": 0.4}
    place = {"model": model, "block": block, "attack": attack, "setting": setting, "image_id": f"i{image}"}
    options = {"weights": weights, "threat_model": USUAL, "details": {"condition": 1e6}} | changes
    return make_row(**place, **scores, **options)


@pytest.fixture
def rows() -> pd.DataFrame:
    made = []
    for image in range(6):
        for block in ("standard", "april"):
            for setting in ("b", "a"):
                made.append(row("m", block, "april", setting, image, 10.0 + image))
                made.append(row("m", block, "closed", setting, image, 30.0 + image))
        made.append(row("m_nope", "april", "april", "a", image, None, diagnosis="no positions", details={}))
        made.append(row("m_nope", "april", "april", "a", image, 12.0, threat_model=[*USUAL, "token_gradient"]))
        made.append(row("m", "april", "april", "a", image, 50.0, precision="float64"))
        made.append(row("m", "april", "april", "a", image, 25.0, weights="public.pt"))
        made.append(row("(no gradient)", "", "mean_image", "a", image, 9.0, weights="", threat_model=[], details={}))
    frame = pd.DataFrame(made)
    return frame.astype(dict.fromkeys([*METRICS, "seconds", "gradient_norm"], "float64"))


@pytest.fixture
def table(rows) -> pd.DataFrame:
    return leakage_table(rows, {("m", "public.pt", "april", "a"): 71.5}, PAPER)


def line(table: pd.DataFrame, **where) -> pd.Series:
    found = table[np.logical_and.reduce([table[k] == v for k, v in where.items()])]
    assert len(found) == 1, found
    return found.iloc[0]


def test_order_is_block_attack_setting(table) -> None:
    keys = list(zip(table["block"], table["attack"], table["setting"], strict=True))
    assert list(dict.fromkeys(keys)) == [
        *[("april", a, s) for a in ("april", "closed") for s in ("a", "b")],
        *[("standard", a, s) for a in ("april", "closed") for s in ("a", "b")],
        ("", "mean_image", "a"),
    ]


def test_labels_tell_what_is_out_of_the_ordinary(table) -> None:
    own = table[(table["block"] == "april") & (table["attack"] == "april") & (table["setting"] == "a")]
    assert set(own["line"]) == {"m", "m_nope", "m_nope (token_gradient)", "m (float64)", "m (trained)"}
    assert line(table, line="m (trained)")["accuracy"] == 71.5
    assert table["accuracy"].notna().sum() == 1


def test_the_papers_figures_stand_beside_its_own_protocol_only(table) -> None:
    published = table[table["paper_psnr"].notna()]
    assert set(zip(published["block"], published["attack"], published["setting"], strict=True)) == {
        ("april", "april", "a")
    }
    assert line(table, line="m_nope (token_gradient)")["paper_psnr"] == 20.0
    assert np.isnan(line(table, line="m_nope")["paper_psnr"])
    assert np.isnan(line(table, line="m (float64)")["paper_psnr"])


def test_seeds_are_averaged_image_by_image(rows) -> None:
    second = rows[rows["precision"] == "float32"].assign(seed=8, psnr=lambda r: r["psnr"] + 2)
    second["weights"] = second["weights"].str.replace("seed 0", "seed 8")
    both = leakage_table(pd.concat([rows, second]), {}, PAPER)
    found = line(both, line="m", block="standard", attack="april", setting="a")
    assert found["count"] == 6
    assert found["psnr_mean"] == pytest.approx(np.mean([10, 11, 12, 13, 14, 15]) + 1)


def test_text_latex_and_markdown_say_the_same(table) -> None:
    console = Console(width=140, record=True)
    console.print(leakage_text(table, "april"))
    text, latex, markdown = console.export_text(), leakage_latex(table, "april"), leakage_markdown(table, "april")
    for shown in (text, latex, markdown):
        assert "12.5" in shown
        assert "mean" in shown
        assert shown.count("0 of 6") == 1
    assert text.count("paper") == 3
    assert "(19.00)" in latex
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    columns = latex.split(r"\begin{tabular}{")[1].split("}")[0]
    bodies = [ln for ln in latex.splitlines() if "&" in ln]
    assert {ln.count("&") + 1 for ln in bodies} == {len(columns)}
    assert {ln.count("|") for ln in markdown.splitlines()} == {10}
    assert "NOT TRAINED" in text


def test_rows_of_several_parameters_are_not_mixed(rows) -> None:
    both = pd.concat([rows, rows.assign(attack_parameters=[{"steps": 1}] * len(rows))])
    with pytest.raises(UsageError, match="several parameters"):
        leakage_table(both, {}, PAPER)


def test_rows_of_several_data_sets_are_not_mixed(rows) -> None:
    with pytest.raises(UsageError, match="several data sets"):
        leakage_table(pd.concat([rows, rows.assign(dataset="other", image_id="j")]), {}, PAPER)


def test_files(tmp_path, table, rows) -> None:
    with RowLog(tmp_path / "rows.jsonl") as log:
        for row in rows.to_dict("records"):
            log.append(row)
    LEAKAGE.write(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        *("rows.jsonl", "rows.jsonl.sums", "table.csv", "condition.png", "condition.pdf"),
        *("table_april.tex", "table_april.md", "table_standard.tex", "table_standard.md"),
    }
    assert len(pd.read_csv(tmp_path / "table.csv")) == len(table)


def test_nothing_to_draw_is_said(tmp_path, rows) -> None:
    with pytest.raises(ValueError, match="condition number"):
        condition_figure(labelled(rows.assign(psnr=np.nan)), tmp_path / "x.png")


def test_the_pictured_attack_is_the_strongest_by_the_rule_of_the_verdict() -> None:
    """Not by the mean PSNR: one exact answer of many does not outweigh being better on every other image."""

    def rows_of(attack: str, values: list[float | None], model: str = "m", setting: str = "a") -> list[dict]:
        return [row(model, "standard", attack, setting, image, value) for image, value in enumerate(values)]

    lucky, steady = [9.0, 9.5, 120.0, 9.0], [24.0, 23.0, 24.5, 22.0]
    attacks = rows_of("lucky", lucky) + rows_of("steady", steady) + rows_of("silent", [None] * 4)
    elsewhere = rows_of("lucky", [100.0] * 4, setting="b") + rows_of("lucky", [100.0] * 4, model="m_nope")
    guesses = rows_of("mean_image", [10.0, 11.0, 12.0, 10.0], model="(no gradient)")
    rows = pd.DataFrame(attacks + elsewhere + guesses)
    assert strongest_first(rows, "standard", ["m"], lambda name: True) == ["steady", "lucky"]
    assert strongest_first(rows, "standard", ["m"], "silent".__eq__) == []
    assert strongest_first(rows, "april", ["m"], "lucky".__eq__) == []
