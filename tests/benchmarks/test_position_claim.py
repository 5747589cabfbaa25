"""The paired comparison with and without position embeddings."""

from __future__ import annotations

import april_attack
import pandas as pd
import position_claim as command
import pytest
from experiments.leakage import position_claim

from tests.conftest import leave_undrawn


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("claim") / "out"
    options = [
        "--model",
        "vit_mini_64",
        "vit_mini_64_nope",
        "--weights",
        "random",
        "--attacks",
        "patch_embedding",
        "--block",
        "standard",
    ]
    with pytest.MonkeyPatch.context() as patched:
        leave_undrawn(patched)
        assert april_attack.main([*options, "--num-images", "6", "--out", str(out)]) == 0
    return out


def test_differences_are_paired_by_image(out, capsys) -> None:
    assert command.main(["--rows", str(out / "rows.jsonl.gz"), "--model", "vit_mini_64"]) == 0
    printed = capsys.readouterr().out
    assert "gave an image in 0 of 18 attacks" in printed
    assert "no learnable position embedding" in printed
    table = pd.read_csv(out / "position_claim.csv").set_index(["setting", "metric"])
    summary = pd.read_csv(out / "table.csv").set_index(["setting", "line"])["psnr_mean"]
    expected = summary["a", "vit_mini_64_nope (token_gradient)"] - summary["a", "vit_mini_64"]
    assert table.loc[("a", "psnr"), "difference_mean"] == pytest.approx(expected, abs=1e-2)
    assert table.loc[("a", "psnr"), "count"] == 6
    assert (out / "position_claim.md").read_text().count("\n") == 2 + 3


@pytest.mark.parametrize(("shift", "verdict"), [(5.0, "easier"), (-5.0, "harder"), (0.0, "no different")])
def test_verdicts(shift: float, verdict: str) -> None:
    lines = []
    for image in range(8):
        for name, grants, psnr in (("deit_s", [], 20.0), ("deit_s_nope", ["token_gradient"], 20.0 + shift)):
            place = {"block": "april", "attack": "april", "setting": "a", "seed": 0, "image_id": image}
            scores = {"psnr": psnr + image, "ssim": None, "lpips": None}
            lines.append(place | scores | {"model": name, "precision": "float32", "threat_model": grants})
    frame = pd.DataFrame(lines).astype({"psnr": float, "ssim": float, "lpips": float})
    table = position_claim.differences(frame, "deit_s")
    assert table["verdict"].tolist() == [verdict]
    assert table["paper_difference"].tolist() == [pytest.approx(1.28)]


def test_rows_of_one_model_only_are_a_mistake(out, capsys) -> None:
    assert command.main(["--rows", str(out / "rows.jsonl.gz"), "--model", "vit_s"]) == 2
    assert "run benchmarks/april_attack.py with both" in capsys.readouterr().err
