"""Corruptions that a seed fixes, mCE by hand, and the script as a user meets it, interruptions included."""

from __future__ import annotations

import gzip
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import corruptions as command
import numpy as np
import pandas as pd
import pytest
import torch
from experiments.trained_models import corrupted, corruption_table, corruptions
from experiments.trained_models.checkpoints import load_trained
from experiments.trained_models.options import CORRUPTIONS, CorruptionOptions
from safetensors.torch import save_file
from scipy import stats

from fedmjp.data import load_data
from fedmjp.models import build_model
from tests.conftest import interrupted_at

pytestmark = pytest.mark.usefixtures("drawn")

# OpenCV, on which the package stands, needs a system library (libGL) that bare containers lack.
pytest.importorskip("cv2", reason="OpenCV cannot be loaded here", exc_type=ImportError)
imagecorruptions = pytest.importorskip("imagecorruptions")

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def images():
    return load_data("photos", size=64).test.subset(range(3))


def test_names_are_those_of_imagenet_c() -> None:
    assert list(CORRUPTIONS) == imagecorruptions.get_corruption_names("common")
    assert set(corruption_table.paper_corruptions()) < set(CORRUPTIONS)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_seed_fixes_a_picture(name, images) -> None:
    """Alone or in a batch, whatever was drawn before; and NumPy's generator is left as it was."""
    pictures = images.images(range(3))
    state = np.random.get_state()[1].copy()
    whole = corrupted.corrupt(pictures, images.ids, name, 3, 0)
    assert np.array_equal(np.random.get_state()[1], state)
    alone = corrupted.corrupt(pictures[2:], images.ids[2:], name, 3, 0)
    assert torch.equal(whole[2:], alone)
    assert whole.shape == pictures.shape
    assert 0 <= float(whole.min()) <= float(whole.max()) <= 1
    assert not torch.equal(whole, pictures)


def test_image_severity_and_seed_draw_anew(images) -> None:
    flat = torch.full((2, 3, 64, 64), 0.5)
    first, second = corrupted.corrupt(flat, ["a", "b"], "gaussian_noise", 2, 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, corrupted.corrupt(flat[:1], ["a"], "gaussian_noise", 2, 1)[0])
    spread = [float(corrupted.corrupt(flat[:1], ["a"], "gaussian_noise", s, 0).std()) for s in (1, 2, 3)]
    assert spread == pytest.approx([0.08, 0.12, 0.18], rel=0.05)  # ImageNet-C's constants
    assert torch.equal(corrupted.corrupt(flat, ["a", "b"], "none", 0, 0), flat)


def test_mce_by_hand() -> None:
    """Four images, two corruptions at two severities."""
    cells = [("none", 0), ("contrast", 1), ("contrast", 2), ("snow", 1), ("snow", 2)]
    plain = pd.DataFrame(np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 0, 1], [1, 1, 1, 1, 1]]))
    other = pd.DataFrame(np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]]))
    plain.columns = other.columns = pd.MultiIndex.from_tuples(cells)
    table, summary = corruption_table.tables({"plain": [plain], "other": [other]}, "plain")
    found = table.set_index(["model", "corruption"])
    assert found.loc[("plain", "contrast"), "error_mean"] == 75  # 2 of 4 and 4 of 4
    assert found.loc[("other", "contrast"), "error_mean"] == 37.5  # 1 of 4 and 2 of 4
    assert found.loc[("other", "contrast"), "error_severity_2"] == 50
    assert found.loc[("other", "contrast"), "ce_mean"] == 50
    assert found.loc[("other", "snow"), "ce_mean"] == pytest.approx(100 * 75 / 87.5)
    means = summary.set_index(["model", "corruptions"])
    assert means.loc[("other", "all"), "mce_mean"] == pytest.approx((50 + 100 * 75 / 87.5) / 2)
    assert means.loc[("other", "all"), "error_mean"] == pytest.approx((37.5 + 75) / 2)
    assert means.loc[("other", "all"), "rise_mean"] == pytest.approx((37.5 + 75) / 2 - 50)
    assert means.loc[("other", "all"), "rise_difference_mean"] == pytest.approx((56.25 - 50) - (81.25 - 25))
    assert means.loc[("other", "table 9"), "difference_mean"] == -37.5  # snow is none of the paper's ten
    assert means.loc[("other", "none"), "error_mean"] == 50
    assert means.loc[("plain", "all"), ["mce_mean", "mce_low", "mce_high"]].tolist() == [100, 100, 100]
    assert means.loc[("plain", "all"), ["difference_low", "difference_high"]].tolist() == [0, 0]


def test_several_trainings_by_hand() -> None:
    """Three pairs: means and Student's intervals over trainings, paired by place, and a sign beside the paper's."""
    cells = pd.MultiIndex.from_tuples([("none", 0), ("contrast", 1)])

    def answers(*counts: int) -> list[pd.DataFrame]:
        """One frame a training: every tenth image wrong untouched, so many of ten under contrast."""
        frames = [np.stack([np.arange(10) < 1, np.arange(10) < count], axis=1) for count in counts]
        return [pd.DataFrame(frame.astype(np.uint8), columns=cells) for frame in frames]

    wrong = {"vit": answers(5, 6, 7), "vit_mjp": answers(4, 5, 5), "vit_nope": answers(5, 6, 7)}
    table, summary = corruption_table.tables(wrong, "vit")
    found, means = table.set_index("model"), summary.set_index(["model", "corruptions"])
    differences = np.array([-10.0, -10.0, -20.0])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert found.loc["vit", "error_mean"] == pytest.approx(60)
    assert found.loc["vit_mjp", "difference_mean"] == pytest.approx(differences.mean())
    assert found.loc["vit_mjp", "difference_low"] == pytest.approx(differences.mean() - half)
    assert found.loc["vit_mjp", "difference_p"] == pytest.approx(stats.ttest_rel([4, 5, 5], [5, 6, 7]).pvalue)
    assert found.loc["vit_mjp", "ce_mean"] == pytest.approx(np.mean([400 / 5, 500 / 6, 500 / 7]))
    assert found.loc["vit_mjp", "error_severity_1"] == pytest.approx(100 * 14 / 30)
    assert found.loc["vit_mjp", "paper_difference"] == pytest.approx(34.5 - 36.1)
    assert found.loc["vit_mjp", "verdict"] == "cannot tell"  # p 0.057, and the mean of the ten is tested with it
    assert found.loc["vit_nope", "verdict"] == ""  # the paper tells nothing of it
    assert means.loc[("vit_mjp", "table 9"), "paper_difference"] == pytest.approx(43.24 - 44.0)
    assert means.loc[("vit_mjp", "none"), "verdict"] == ""
    assert set(table["seeds"]) == {3}


def test_an_established_sign_is_told() -> None:
    cells = pd.MultiIndex.from_tuples([("none", 0), ("contrast", 1)])
    few, many = (pd.DataFrame(np.arange(10)[:, None] < [1, count], columns=cells) for count in (3, 6))
    table, summary = corruption_table.tables({"vit": [many] * 3, "vit_mjp": [few] * 3}, "vit")
    assert table.set_index("model").loc["vit_mjp", "verdict"] == "agrees"
    table, summary = corruption_table.tables({"vit": [few] * 3, "vit_mjp": [many] * 3}, "vit")
    assert summary.set_index(["model", "corruptions"]).loc[("vit_mjp", "table 9"), "verdict"] == "contradicts"


def test_papers_mce_is_no_mean_of_its_table_9() -> None:
    """DeiT-S's printed mCE is the mean of its ten errors; the MJP model's is not."""
    lines = corruption_table.paper_lines("summary.csv").set_index("model")
    assert lines["error_mean"].to_dict() == pytest.approx({"deit_s": 44.0, "deit_s_mjp": 43.24})
    assert lines["paper_mce"].to_dict() == {"deit_s": 44.0, "deit_s_mjp": 41.5}


@pytest.fixture
def call(tmp_path):
    """Options for two small models on six photographs; random weights, one with a head that answers by the image."""
    entries = []
    for name in ("vit_mini_64", "vit_mini_64_mjp"):
        built = build_model(name, num_classes=8, weights="random", dal="none")
        torch.nn.init.normal_(built.module.head.weight, generator=torch.Generator().manual_seed(len(name)))
        save_file(built.module.state_dict(), tmp_path / f"{name}.safetensors")
        entries.append(f"{name}={tmp_path / name}.safetensors")
    few = ["--corruptions", "contrast", "impulse_noise", "--severities", "1", "5", "--num-images", "6"]
    return ["--model", *entries, "--data", "photos", *few]


def test_an_interrupted_run_is_taken_up_where_it_stopped(call, tmp_path, capsys) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert command.main([*call, "--out", str(whole)]) == 0
    with interrupted_at(corruptions, "mistakes", 6) as calls:  # the second model in the third of five cells
        assert command.main([*call, "--out", str(broken)]) == 130
        assert f"go on with --resume --out {broken}" in capsys.readouterr().err
        assert len((broken / "rows.jsonl").read_text().splitlines()) == 4
        assert command.main([*call, "--out", str(broken)]) == 2
        assert "holds rows already; pass --resume" in capsys.readouterr().err
        assert command.main([*call, "--out", str(broken), "--resume"]) == 0
    assert len(calls) == 6 + 6
    for name in ("rows.jsonl.gz", "table.csv", "summary.csv"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    rows = [json.loads(line) for line in gzip.decompress((whole / "rows.jsonl.gz").read_bytes()).splitlines()]
    assert len(rows) == 10
    assert all(row["error"] == pytest.approx(100 * row["wrong"].count("1") / 6) for row in rows)
    summary = pd.read_csv(whole / "summary.csv", keep_default_na=False)
    assert summary["source"].tolist() == ["measured"] * 6 + ["paper, Tables 4 and 9"] * 2
    assert (whole / "corruptions.png").stat().st_size > 10_000


@pytest.mark.long
def test_other_weights_are_measured_anew(call, tmp_path) -> None:
    """Rows are known by what the weights are, not by what their file is called."""
    out = tmp_path / "out"
    assert command.main([*call, "--out", str(out)]) == 0
    built = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none", seed=1)
    save_file(built.module.state_dict(), tmp_path / "vit_mini_64_mjp.safetensors")
    assert command.main([*call, "--out", str(out), "--resume"]) == 0
    assert len(gzip.decompress((out / "rows.jsonl.gz").read_bytes()).splitlines()) == 15
    assert len(pd.read_csv(out / "table.csv").query("source == 'measured'")) == 4


@pytest.mark.long
def test_several_trainings_of_a_model(call, tmp_path, capsys) -> None:
    """Each is measured once; a block says what brackets and words stand for."""
    for seed in (1, 2):
        for name in ("vit_mini_64", "vit_mini_64_mjp"):
            built = build_model(name, num_classes=8, weights="random", dal="none", seed=seed)
            save_file(built.module.state_dict(), tmp_path / f"{name}-{seed}.safetensors")
            call[1:1] = [f"{name}={tmp_path / name}-{seed}.safetensors"]
    out = tmp_path / "out"
    assert command.main([*call, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in gzip.decompress((out / "rows.jsonl.gz").read_bytes()).splitlines()]
    assert len(rows) == 6 * 5
    assert len({row["state"] for row in rows}) == 6
    block = corruption_table.corruption_block(out)
    assert "Means over 3 trainings" in block
    assert "3 signs were tested together" in block  # of two corruptions, and of their mean
    unpaired = [call[0], "vit_mini_64=another.safetensors", *call[1:]]
    assert command.main([*unpaired, "--out", str(tmp_path / "other")]) == 2
    assert "differences are paired" in capsys.readouterr().err


def test_a_missing_package_ends_in_one_line(call, tmp_path, monkeypatch, capsys) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(corrupted, "version", absent)
    assert command.main([*call, "--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert "corruptions need imagecorruptions-imaug" in complaint
    assert "pip install 'fedmjp[tables]'" in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "vit_x"], "unknown model"),
        (["--model", "vit_b"], "no trained weights of vit_b"),
        (["--reference", "vit_b"], "--reference vit_b is none of the models"),
        (["--corruptions", "rain"], "--corruptions rain: choose from: gaussian_noise"),
        (["--severities", "6"], "numbers from 1 to 5"),
        (["--model", "vit_mini_64", "vit_ti=x.safetensors"], "run them apart"),
        (["--model", "vit_mini_64", "--data", "photos"], "are for 200 classes, photos has 8"),
        (["--model", "vit_mini_64", "vit_mini_64"], "--model vit_mini_64 is there twice"),
    ],
)
def test_mistakes_end_in_one_line(options, words, tmp_path, capsys) -> None:
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1


def test_committed_answers_come_out_again() -> None:
    """The shipped checkpoints' answers to the first 100 images, untouched and at little contrast."""
    folder = ROOT / "runs" / "tiny-imagenet"
    if not folder.exists():
        pytest.skip("needs Tiny-ImageNet in runs/tiny-imagenet")
    content = gzip.decompress((ROOT / "results" / "corruptions" / "rows.jsonl.gz").read_bytes())
    rows = [json.loads(line) for line in content.splitlines()]
    bundle = load_data("tiny-imagenet", size=64, path=folder, test_limit=rows[0]["images"], seed=rows[0]["seed"])
    pictures, labels = bundle.test.images(range(100)), bundle.test.labels[:100]
    checked = 0
    for row in rows:
        if (row["corruption"], row["severity"]) not in (("none", 0), ("contrast", 3)):
            continue
        model = load_trained(CorruptionOptions(), row["model"], "auto", bundle)
        if row["state"] == corruptions.fingerprint(model):
            seen = corrupted.corrupt(pictures, bundle.test.ids[:100], row["corruption"], row["severity"], row["seed"])
            wrong = "".join(map(str, corruptions.mistakes(model, seen, labels).tolist()))
            assert sum(a != b for a, b in zip(wrong, row["wrong"], strict=False)) <= 1  # a tie may fall otherwise
            checked += 1
    if not checked:
        pytest.skip("results/corruptions was measured with other weights than those that ship")
