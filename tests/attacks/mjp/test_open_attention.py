"""Patches beside wrong ones, with attention open along what these change for all tokens."""

from __future__ import annotations

import pytest
import torch

from attacks.mjp.attended_tokens import AttendedSearch
from attacks.mjp.known_attention import PatchSweeps, SweepSearch
from attacks.mjp.open_attention import OpenAttention, attention_errors
from fedmjp.models import build_model
from tests.attacks.mjp.test_attended_tokens import guessed, sweeps_of
from tests.conftest import photographs


@pytest.fixture(scope="module")
def case() -> tuple[PatchSweeps, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An update in float32, its patches, their scales, and coefficients with one unseen patch wrong."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    sweeps, patches, scales = sweeps_of(model, photographs(64, 3)[2:], gamma=0.1)
    c = sweeps.coefficients(patches)
    c[sweeps.known.unseen.nonzero()[0, 0]] = c[~sweeps.known.unseen].mean(dim=0)
    return sweeps, patches, scales, c


def errors(sweeps: PatchSweeps, patches: torch.Tensor, found: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rms errors (N,) of pixels in [0, 1]."""
    return ((found - patches) * scales).square().mean(dim=1).sqrt()


def test_errors_of_attention_are_what_wrong_patches_change(case) -> None:
    sweeps, patches, _, c = case
    true, received = (sweeps.attended(one)[sweeps.prefix :] for one in (sweeps.coefficients(patches), c))
    seen = ~sweeps.known.unseen
    centred = (true - received)[seen]
    centred = centred - centred.mean(dim=1, keepdim=True)
    left = attention_errors(3.0 * true[seen] + 0.5, received[seen])
    # Fitting the scale takes a small part along.
    assert float((left - centred).norm() / centred.norm()) < 0.2
    sizes = torch.linalg.svdvals(left)
    assert float(sizes[0].square() / sizes.square().sum()) > 0.5


def test_patches_are_certified_beside_a_wrong_one(case) -> None:
    sweeps, patches, scales, c = case
    attended = AttendedSearch()(sweeps, guessed(sweeps, patches), scales)
    closed = SweepSearch().polished(sweeps, c)
    moved, opened = OpenAttention()(sweeps, c, attended, scales)
    assert int(closed.found.sum()) < len(c) / 2
    assert int(opened.found.sum()) >= len(c) - 1
    right = errors(sweeps, patches, sweeps.patches(moved), scales)
    assert float(right[opened.found].quantile(0.9)) < 1e-2
    wrong = errors(sweeps, patches, sweeps.patches(closed.c), scales)
    assert float(right.median()) < float(wrong.median()) / 3


def test_expected_deviations_cover_the_errors(case) -> None:
    sweeps, patches, scales, c = case
    attended = AttendedSearch()(sweeps, guessed(sweeps, patches), scales)
    _, opened = OpenAttention()(sweeps, c, attended, scales)
    error = errors(sweeps, patches, opened.patches, scales)[opened.found]
    assert float((error / opened.deviation[opened.found]).median()) < 3
