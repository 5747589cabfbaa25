"""Missing patches from what they bring to the attention of the tokens that were found."""

from __future__ import annotations

import pytest
import torch

from attacks.mjp.attended_tokens import Attended, AttendedSearch
from attacks.mjp.known_attention import PatchSweeps, SweepSearch
from attacks.mjp.patch_search import Searches, _joint
from attacks.mjp.shown_attention import Shown, ShownAttention
from attacks.mjp.token_search import TokenSearch
from fedmjp.models import build_model
from tests.attacks.mjp.test_attended_tokens import guessed, sweeps_of
from tests.attacks.mjp.test_open_attention import errors
from tests.conftest import photographs


@pytest.fixture(scope="module")
def case() -> tuple[PatchSweeps, torch.Tensor, torch.Tensor, Attended]:
    """An update in float32, its patches, their scales, and what is certified without attention."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    sweeps, patches, scales = sweeps_of(model, photographs(64, 3)[2:], gamma=0.1)
    return sweeps, patches, scales, AttendedSearch()(sweeps, guessed(sweeps, patches), scales)


def without(sweeps: PatchSweeps, patches: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients (N, k) that hold the mean patch at the first unseen places, and these places (N,) bool."""
    c = sweeps.coefficients(patches)
    missing = torch.zeros_like(sweeps.known.unseen).index_fill(0, sweeps.known.unseen.nonzero()[:count, 0], True)
    c[missing] = c[~sweeps.known.unseen].mean(dim=0)
    return c, missing


def test_what_is_received_and_its_slopes_are_those_of_the_block(case) -> None:
    sweeps, patches, *_ = case
    tokens, places, count = sweeps.tokens(sweeps.coefficients(patches)), torch.tensor([5, 9, 30]), 4
    directions, alike = sweeps.family.directions[:3], torch.tensor([0, 1, 0, 1])
    shown = Shown(sweeps.block, torch.randn(3, tokens.shape[1]).double(), tokens[places], tokens[:-count])
    expected = sweeps.block.attend(tokens[places], tokens)
    torch.testing.assert_close(shown.received(tokens[-count:]), expected)

    def errors(x: torch.Tensor) -> torch.Tensor:
        return shown.errors(tokens[-count:] + x.reshape(2, 3)[alike] @ directions)

    slopes = shown.slopes(tokens[-count:], directions, alike)
    torch.testing.assert_close(slopes, torch.autograd.functional.jacobian(errors, torch.zeros(6).double()))


@pytest.mark.parametrize("count", [1, 2])
def test_missing_patches_are_found_and_all_places_certified(case, count: int) -> None:
    sweeps, patches, scales, attended = case
    c, missing = without(sweeps, patches, count)
    assert int(sweeps.swept(c).found.sum()) < len(c) / 2
    joint = _joint(Searches(TokenSearch(), SweepSearch()), sweeps, c, attended, missing)
    assert joint.found.double().mean() > 0.9
    # Unseen places are alike: either patch may be at either.
    before, after = (
        torch.cdist(patches[missing] * scales, sweeps.patches(one)[missing] * scales).amin(dim=1) / len(scales) ** 0.5
        for one in (c, joint.c)
    )
    assert float(after.max()) < 0.03 < float(before.min())


def test_many_missing_patches_are_taken_for_alike(case) -> None:
    """Their sum is nearer then, and with it the attention of all others."""
    sweeps, patches, _, attended = case
    c, missing = without(sweeps, patches, 5)
    solved = ShownAttention(unknowns=c.shape[1])(sweeps, c, attended, missing)
    moved = (solved - c)[missing]
    torch.testing.assert_close(moved, moved[:1].expand_as(moved))
    true, before, after = (
        sweeps.attended(one)[sweeps.prefix :][~missing] for one in (sweeps.coefficients(patches), c, solved)
    )
    assert float((after - true).norm()) < float((before - true).norm())


def test_nothing_moves_where_attention_is_right_already(case) -> None:
    sweeps, patches, scales, attended = case
    c, missing = sweeps.coefficients(patches), without(sweeps, patches, 1)[1]
    solved = ShownAttention()(sweeps, c, attended, missing)
    torch.testing.assert_close(solved[~missing], c[~missing])
    assert float(errors(sweeps, patches, sweeps.patches(solved), scales).max()) < 0.02
