"""Measures of attention maps with known answers, and the script as a user meets it."""

from __future__ import annotations

import math

import attention_maps as command
import numpy as np
import pandas as pd
import pytest
import torch
from experiments.trained_models import attention_maps
from experiments.trained_models.render import attention_block
from safetensors.torch import save_file

from fedmjp.models import build_model

pytestmark = pytest.mark.usefixtures("drawn")

GRID = (4, 4)


def one_hot(*places: int) -> torch.Tensor:
    """(len(places), 16)."""
    return torch.eye(16, dtype=torch.float64)[list(places)]


def test_cls_maps_leave_out_what_cls_pays_itself() -> None:
    attention = torch.zeros(1, 2, 17, 17)
    attention[0, 0, 0, :3] = torch.tensor([0.5, 0.3, 0.2])
    attention[0, 1, 0, 16] = 1
    maps = attention_maps.cls_maps(attention, 1)
    assert maps[0, 0, :2].tolist() == pytest.approx([0.6, 0.4])
    assert maps[0, 1].tolist() == one_hot(15)[0].tolist()


def test_entropy() -> None:
    shares = torch.stack([torch.full((16,), 1 / 16), one_hot(3)[0], (one_hot(3) + one_hot(4))[0] / 2])
    assert attention_maps.entropy(shares).tolist() == pytest.approx([math.log(16), 0, math.log(2)])


def test_distance_of_uniform_and_of_own_patch() -> None:
    uniform, own = torch.full((1, 1, 17, 17), 1 / 17), torch.eye(17).view(1, 1, 17, 17)
    places = [(row / 4, column / 4) for row in range(4) for column in range(4)]
    apart = np.mean([math.dist(a, b) for a in places for b in places])
    assert attention_maps.attention_distance(uniform, 1, GRID).item() == pytest.approx(apart)
    assert attention_maps.attention_distance(own, 1, GRID).item() == 0


def test_head_diversity_spans_zero_to_one() -> None:
    same, disjoint = one_hot(2, 2, 2)[None], one_hot(0, 1, 2)[None]
    assert attention_maps.head_diversity(torch.cat([same, disjoint])).tolist() == pytest.approx([0, 1])
    assert attention_maps.head_diversity(one_hot(2)[None]).tolist() == [0]


def test_content_is_mutual_information() -> None:
    assert attention_maps.content(one_hot(5, 5, 5)).tolist() == [0, 0, 0]
    assert attention_maps.content(one_hot(5, 6)).tolist() == [1, 1]  # one bit: which of the two images it is
    maps = torch.rand(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    maps = maps / maps.sum(dim=1, keepdim=True)
    between = attention_maps.entropy(maps.mean(dim=0)) - attention_maps.entropy(maps).mean()
    assert float(attention_maps.content(maps).mean()) == pytest.approx(float(between) / math.log(2))


def checkpoint(folder, name: str, classes: int = 8) -> str:
    path = folder / f"{name}_{classes}.safetensors"
    save_file(build_model(name, num_classes=classes, weights="random").module.state_dict(), path)
    return f"{name}={path}"


def test_table_and_figure(tmp_path) -> None:
    models = [checkpoint(tmp_path, name) for name in ("vit_mini_64", "vit_mini_32")]
    options = ["--data", "photos", "--num-images", "6", "--photographs", "2", "--out", str(tmp_path / "out")]
    assert command.main(["--model", *models, *options]) == 0
    assert (tmp_path / "out" / "attention.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "run.json").exists()
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert table["model"].tolist() == ["vit_mini_64", "vit_mini_32"] * 2
    assert table["count"].tolist() == [6] * 4
    # Random weights look nearly everywhere alike, and these checkpoints are the same random weights.
    assert table["entropy_mean"].min() > 0.99
    assert table["entropy_difference_mean"].tolist() == pytest.approx([0] * 4, abs=0.01)
    assert table["content_mean"][0] == table["content_mean"][2]


def test_means_over_trainings(tmp_path) -> None:
    """One mean a training, and intervals over these means."""
    entries, scale = [], {"vit_mini_64": 1.0, "vit_mini_64_mjp": 12.0}
    for name, factor in scale.items():
        for seed in range(2):
            built = build_model(name, num_classes=8, weights="random", seed=seed)
            with torch.no_grad():
                built.module.blocks[-1].attn.qkv.weight.mul_(factor)  # sharper maps
            save_file(built.module.state_dict(), tmp_path / f"{name}-{seed}.safetensors")
            entries.append(f"{name}={tmp_path / name}-{seed}.safetensors")
    few = ["--data", "photos", "--num-images", "4", "--photographs", "1"]
    assert command.main(["--model", *entries, *few, "--out", str(tmp_path / "all")]) == 0
    table = pd.read_csv(tmp_path / "all" / "table.csv").set_index("model", drop=False)
    single = []
    for seed in range(2):
        pair = [entries[seed], entries[2 + seed]]
        assert command.main(["--model", *pair, *few, "--out", str(tmp_path / f"{seed}")]) == 0
        single.append(pd.read_csv(tmp_path / f"{seed}" / "table.csv").iloc[1])
    for column in ("entropy_mean", "entropy_difference_mean", "content_mean"):
        assert table.loc["vit_mini_64_mjp", column] == pytest.approx(np.mean([one[column] for one in single]), rel=1e-3)
    assert table["seeds"].tolist() == [2, 2, 1]
    assert pd.isna(table["entropy_difference_mean"].iloc[2])  # random weights are not paired with a seed
    assert "Means over 2 trainings" in attention_block(tmp_path / "all")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "vit_x"], "unknown model"),
        (["--model", "vit_b"], "no trained weights of vit_b"),
        (["--model", "FILE", "--reference", "vit_b"], "--reference vit_b is none of the models: vit_mini_64"),
        (["--model", "FILE", "--data", "photos"], "are for 5 classes"),
        (["--model", "FILE", "--photographs", "9"], "--photographs takes numbers from 1 to 8"),
    ],
)
def test_mistakes_end_in_one_line(options, words, tmp_path, capsys) -> None:
    options = [checkpoint(tmp_path, "vit_mini_64", 5) if o == "FILE" else o for o in options]
    assert command.main([*options, "--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1
