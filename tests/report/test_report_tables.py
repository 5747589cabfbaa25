"""The summary's numbers against SciPy and plain NumPy, the LaTeX against its grammar."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import stats

from fedmjp import metrics
from fedmjp.records.rows import BASELINES, METRICS
from fedmjp.report import as_text, summarise, summary_files
from fedmjp.report.tables import certified_text, interval_text, latex_value, share_text
from tests.records.sample_rows import REFUSAL, make_row


@pytest.fixture(scope="module")
def summary(frame):
    return summarise(frame)


def test_rows_and_metrics_agree_on_names():
    assert tuple(metrics.METRIC_DIRECTIONS) == METRICS
    assert (metrics.MEAN_IMAGE, metrics.OTHER_IMAGE) == BASELINES


def test_groups_come_in_order_of_first_appearance(frame, summary):
    seen = list(dict.fromkeys(zip(frame["defense"], frame["attack"], strict=True)))
    assert list(zip(summary["defense"], summary["attack"], strict=True)) == seen
    assert (summary["count"] == 12).all()


def test_means_medians_and_intervals(frame, summary):
    for line in summary.to_dict("records"):
        chosen = (frame["defense"] == line["defense"]) & (frame["attack"] == line["attack"])
        values = np.array([v for v in frame["psnr"][chosen] if v == v])
        if not len(values):
            assert np.isnan([line["psnr_mean"], line["psnr_low"], line["psnr_high"], line["psnr_median"]]).all()
            continue
        np.testing.assert_allclose(line["psnr_mean"], values.sum() / len(values))
        np.testing.assert_allclose(line["psnr_median"], np.sort(values)[[5, 6]].mean())
        np.testing.assert_allclose(line["seconds_mean"], 1.25)
        oracle = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=2000, rng=1).confidence_interval
        wide = oracle.high - oracle.low
        np.testing.assert_allclose([line["psnr_low"], line["psnr_high"]], oracle, atol=0.15 * wide)


def test_failures_are_counted_and_diagnosed(summary):
    refused = summary[(summary["defense"] == "mjp") & (summary["attack"] == "april_analytic")].iloc[0]
    assert refused["failed"] == refused["count"] == 12
    assert refused["diagnosis"] == REFUSAL
    assert summary["failed"].sum() == 12
    assert summary["lpips_mean"].isna().all()


def test_most_common_diagnosis_ignores_the_empty_one():
    rows = pd.DataFrame([make_row(client=i, diagnosis=d) for i, d in enumerate(["", "", "", "a", "b", "b"])])
    rows = rows.astype(dict.fromkeys(METRICS, "float64"))
    assert summarise(rows)["diagnosis"].tolist() == ["b"]


def test_no_rows_make_an_empty_summary(frame):
    assert list(summarise(frame.iloc[:0]).columns) == list(summarise(frame).columns)


def test_csv_round_trip(frame, summary, tmp_path):
    (tmp_path / "summary.csv").write_text(summary_files(frame)["summary.csv"])
    options = {"keep_default_na": False, "na_values": {"psnr_mean": [""]}, "float_precision": "round_trip"}
    back = pd.read_csv(tmp_path / "summary.csv", **options)
    np.testing.assert_array_equal(back["psnr_mean"], summary["psnr_mean"])
    origin = back[["run_id", "dataset", "defense_parameters", "update", "batch_size"]].drop_duplicates()
    assert origin.values.tolist() == [["sample", "faces", '{"ratio": 0.3}', "gradient", 1]]
    assert back["defense"].tolist() == summary["defense"].tolist()


def test_latex_is_balanced_and_escaped(frame):
    rows = frame.assign(model=r"vit_50%&#{~}^\$")
    text, summary = summary_files(rows)["summary.tex"], summarise(rows)
    body = [line.removesuffix("%") for line in text.splitlines() if not line.startswith("%")]
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert r"vit\_50\%\&\#\{\textasciitilde{}\}\textasciicircum{}\textbackslash{}\$" in text
    assert r"closed\_form" in text
    columns = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1))
    rows = [line for line in body if line.endswith(r"\\") and "multicolumn" not in line]
    assert len(rows) == 1 + len(summary)
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {columns - 1}
    assert all(len(re.findall(r"(?<!\\)\$", line)) % 2 == 0 for line in body)
    assert not any(re.search(r"(?<!\\)[_#%]", line) for line in body)


def test_latex_values_and_arrows(frame, summary):
    text = summary_files(frame)["summary.tex"]
    first = summary.iloc[0]
    assert rf"${first['psnr_mean']:.2f} \pm {(first['psnr_high'] - first['psnr_low']) / 2:.2f}$" in text
    for heading in (r"PSNR (dB) $\downarrow$", r"SSIM $\downarrow$", r"Patches $>$ 25 dB $\downarrow$"):
        assert heading in text
    assert "LPIPS" not in text  # nothing measured


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX (pdflatex) is not installed")
def test_latex_fits_the_text_width_of_a_two_column_article(frame, tmp_path):
    rows = frame.assign(lpips=0.1234, defense="mjp:gamma=0.1,jigsaw_probability=0.25")
    rows.loc[rows["attack"] == "closed_form", "attack"] = "breaching_see_through_gradients"
    (tmp_path / "summary.tex").write_text(summary_files(rows)["summary.tex"], encoding="utf-8")
    (tmp_path / "paper.tex").write_text(
        r"""\documentclass[twocolumn]{article}
\usepackage{booktabs}
\newsavebox{\measured}
\begin{document}
\begin{table*}\centering\input{summary}\end{table*}
\sbox{\measured}{\input{summary}}
\typeout{WIDTHS \the\wd\measured\space \the\textwidth}
\end{document}
""",
        encoding="utf-8",
    )
    made = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "booktabs.sty' not found" in made.stdout:
        pytest.skip("LaTeX's package booktabs is not installed")
    assert made.returncode == 0, made.stdout[-2000:]
    table, text = map(float, re.search(r"WIDTHS ([\d.]+)pt ([\d.]+)pt", made.stdout).groups())
    assert 100 < table <= text


def test_one_value_has_no_interval(frame):
    line = summarise(frame.head(1)).to_dict("records")[0]
    assert interval_text(line, "psnr", digits=1) == f"{frame['psnr'].iloc[0]:.1f}"
    assert latex_value(line, "psnr") == f"${frame['psnr'].iloc[0]:.2f}$"


def test_vouched_and_certified(frame):
    rows = frame.head(4).assign(attack="closed_form", known=[1.0, 0.5, 0.0, 0.5], certified=[True, False, False, False])
    line = summarise(rows).to_dict("records")[0]
    assert (share_text(line), certified_text(line)) == ("50%", "1 of 4")
    assert share_text(summarise(frame.head(4)).to_dict("records")[0]) == "–"


@pytest.mark.parametrize("width", [80, 120, 160])
def test_terminal_table_fits_and_shows_intervals(summary, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(as_text(summary, width))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    first = summary.iloc[0]
    assert f"{first['psnr_mean']:.2f}" in text
    assert f"[{first['psnr_low']:.2f}, {first['psnr_high']:.2f}]" in text
    assert "0 of 12" in text
    assert "LPIPS" not in text
