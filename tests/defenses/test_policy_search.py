"""The scores of the search of transformation policies against loops, and its command line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedmjp.ats_search import main
from fedmjp.defenses.policy_search import accuracy_score, privacy_score, random_policies
from fedmjp.models import BuiltModel, build_model
from tests.conftest import photographs


@pytest.fixture(scope="module")
def tiny() -> BuiltModel:
    model = build_model("vit_micro16_32", num_classes=8, weights="random")
    model.module.eval()
    return model


def test_the_privacy_score_is_the_area_under_the_similarity(tiny) -> None:
    """Gradients by backward(), cosines and the trapezoidal rule in numpy."""
    images, labels = photographs(32, 2), torch.tensor([3, 1])
    found = privacy_score(tiny, images, labels, torch.Generator().manual_seed(0))
    noise, areas = torch.Generator().manual_seed(0), []
    for b in range(2):
        start = torch.rand(1, 3, 32, 32, generator=noise)
        gradients = []
        for i in [*np.linspace(0, 1, 21), 1.0]:
            tiny.module.zero_grad()
            image = torch.lerp(start, images[b : b + 1], float(i))
            F.cross_entropy(tiny.module(tiny.normalise(image)), labels[b : b + 1]).backward()
            gradients.append(np.concatenate([p.grad.double().flatten().numpy() for p in tiny.module.parameters()]))
        own = gradients.pop()
        cosines = [g @ own / np.linalg.norm(g) / np.linalg.norm(own) for g in gradients]
        areas.append(np.trapezoid(cosines, dx=0.05))
    tiny.module.zero_grad()
    assert found == pytest.approx(np.mean(areas), abs=1e-4)


def test_the_accuracy_score_is_that_of_the_images_correlations(tiny) -> None:
    images = photographs(32, 6)
    slopes = []
    for image in images:
        inputs = tiny.normalise(image[None]).requires_grad_()
        slopes.append(torch.autograd.grad(tiny.module(inputs).sum(), inputs)[0].flatten().double().numpy())
    sizes = np.linalg.eigvals(np.corrcoef(np.stack(slopes))).real + 1e-5
    expected = -np.sum(np.log(sizes) + 1 / sizes)
    assert accuracy_score(tiny, images) == pytest.approx(expected, rel=1e-3)
    assert accuracy_score(tiny, images) <= -6
    alike = images[:1].repeat(6, 1, 1, 1)
    assert accuracy_score(tiny, alike) < -1e4


def test_policies_are_three_numbers_of_the_library() -> None:
    drawn = [list(map(int, p.split("-"))) for p in random_policies(300, torch.Generator().manual_seed(0))]
    assert {len(policy) for policy in drawn} == {3}
    assert {number for policy in drawn for number in policy} == set(range(50))


SMALL = ["--model", "vit_micro8_32", "--policies", "3", "--attacked", "1", "--correlated", "4"]


def test_the_command_lists_the_least_similar_first(capsys) -> None:
    assert main([*SMALL, "--best", "3"]) == 0
    *lines, best = capsys.readouterr().out.strip().splitlines()
    scores = {line.split(":")[0]: float(line.split("privacy score ")[1].split(",")[0]) for line in lines}
    assert len(scores) == 3
    assert best == f"--ats-policy {'+'.join(sorted(scores, key=scores.get))}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policies", "0"], "--policies must be at least 1, not 0"),
        (["--attacked", "9"], "--correlated must be at least 2 and --attacked, not 4"),
        (["--least-accuracy", "0"], "no policy has an accuracy score of 0.0; the highest is"),
        (["--data", "spoken"], "a transformation policy needs"),
        (["--model", "speech_mini"], "a transformation policy is for models of images, not speech_mini"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str, capsys) -> None:
    assert main([*SMALL, *options]) == 2
    printed = capsys.readouterr().err.strip()
    assert words in printed
    assert printed.count("\n") == 0
