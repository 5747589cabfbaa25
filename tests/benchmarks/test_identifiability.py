"""What updates of few numbers determine: derivatives, information by hand, rows, resumption, mistakes."""

from __future__ import annotations

import identifiability
import pandas as pd
import pytest
import torch
from experiments.identifiability.information import RECOGNISABLE, derivatives, determined
from experiments.identifiability.render import SCHEMA
from experiments.withheld.groups import without
from torch.nn import functional

from fedmjp.models import build_model
from fedmjp.records.rows import load_rows
from tests.conftest import observe, photographs

SMALL = ["--model", "vit_micro8_32", "--weights", "random", "--image-size", "16", "--num-images", "1", "--threads", "1"]
GROUPS = ["all but biases and classifier", "all but norms and classifier", "all but the classifier"]


def gradient(module: torch.nn.Module, normalised: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter, of the cross-entropy of label 0."""
    loss = functional.cross_entropy(module(normalised), torch.tensor([0]))
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_derivatives_are_differences_of_the_clients_gradient_in_units_of_its_errors() -> None:
    image, built = photographs(16, 1), build_model("vit_micro8_32", num_classes=8, weights="random", image_size=16)
    view = without(observe(built, image, torch.tensor([0])), GROUPS[0])
    columns, module = derivatives(view, image), built.module.double()
    std = torch.tensor(built.std).double().view(1, 3, 1, 1)
    at, direction = built.normalise(image.double()), torch.randn(image.shape, dtype=torch.float64)
    exact, step = gradient(module, at), 1e-5
    beside = [gradient(module, at + sign * step * direction / std) for sign in (1, -1)]
    assert set(columns) == set(view.gradients)
    for name, found in columns.items():
        error = (view.gradients[name].double() - exact[name]).square().mean().sqrt()
        sigma = max(error, 2e-7 * view.gradients[name].double().square().mean().sqrt())
        moved = (beside[0][name] - beside[1][name]).flatten() / (2 * step)
        moves = direction.flatten() @ found
        per_error = float(moves @ moved / moved.square().sum())
        assert per_error * float(sigma) == pytest.approx(1, rel=0.1)
        torch.testing.assert_close(moves / per_error, moved, rtol=1e-4, atol=1e-6 * float(moved.norm()))


def test_information_by_hand() -> None:
    image = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(1, 1, 2, 2)  # of variance 1/3
    columns = {"a": torch.diag(torch.tensor([1e3, 3.0, 0.0, 0.0])).double(), "b": torch.zeros(4, 1).double()}
    columns["b"][1] = 4.0  # with "a", the second pixel has the information 25
    found = determined(columns, image)
    assert (found.sent, found.values, found.identifiable) == (5, 4, 1)
    left = (1 / (1e6 + 3) + 1 / 28 + 2 / 3) / 4
    assert found.psnr == pytest.approx(-10 * torch.tensor(left).log10().item(), abs=1e-6)
    columns["b"][1] = 1.01 / RECOGNISABLE
    assert determined(columns, image).identifiable == 2


@pytest.mark.long
def test_rows_resume_and_more_numbers_determine_more(tmp_path, capsys) -> None:
    out, more = tmp_path / "out", ["--groups", *GROUPS[1:], "--resume"]
    assert identifiability.main([*SMALL, "--groups", GROUPS[2], "--out", str(out)]) == 0
    assert len(load_rows(out / "rows.jsonl.gz", SCHEMA)) == 1
    assert identifiability.main([*SMALL, *more, "--out", str(out)]) == 0
    table = pd.read_csv(out / "table.csv").set_index("withheld")
    assert set(table.index) == set(GROUPS[1:])
    norms, head = (table.loc[group] for group in GROUPS[1:])
    assert head["identifiable_median"] == 63  # a feature of 64 channels after a layer norm
    assert norms["identifiable_median"] == 4 * 63  # as many for each patch
    assert head["psnr_median"] < norms["psnr_median"]
    before = load_rows(out / "rows.jsonl.gz", SCHEMA)
    assert identifiability.main([*SMALL, *more, "--out", str(out)]) == 0
    assert load_rows(out / "rows.jsonl.gz", SCHEMA).equals(before)
    assert identifiability.main([*SMALL, "--out", str(out)]) == 2
    assert "pass --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--groups", "positions"], "--groups 'positions': choose from: 'nothing'"),
        (["--num-images", "0"], "num-images"),
        (["--groups", "nothing", "--image-size", "32"], "withhold more, up to"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options: list[str], words: str) -> None:
    assert identifiability.main([*SMALL, "--out", str(tmp_path / "out"), *options]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1
