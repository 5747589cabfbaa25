"""Seen patches, each with its attention in the span of the gradient and without the others' patches."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS, find_tokenizer
from attacks.linear.completion import VOUCHED_DEVIATION
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.attended_tokens import AttendedFamily, AttendedSearch, AttentionScales
from attacks.mjp.known_attention import PatchSweeps
from attacks.mjp.mlp_spans import read_first_block
from attacks.mjp.patch_search import better
from attacks.mjp.token_duals import normalised
from attacks.mjp.token_patches import KnownPatches, PlacedPatches
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import pixel_limits, pixel_scales
from fedmjp.models import build_model
from tests.attacks.mjp.test_unmix import masked_update
from tests.conftest import photographs


def sweeps_of(model, image, gamma: float) -> tuple[PatchSweeps, torch.Tensor, torch.Tensor]:
    """The open patches of one masked update, the true ones (N, P), and the scales of their pixels (P,)."""
    view, _, moved = masked_update(model, image, gamma)
    tokenizer, update = find_tokenizer(view.model, view.image_shape), solve_masked(read_position_rows(view))
    known = KnownPatches(update.rows, update.basis, update.masked, update.masked)
    limits, scales = pixel_limits(tokenizer, view, known.rows.device), pixel_scales(tokenizer, view.std, "cpu")
    block = read_first_block(view, tokenizer)
    return PatchSweeps(block, known, limits), tokenizer.patchify(model.normalise(moved))[0].double(), scales


@pytest.fixture(scope="module")
def case() -> tuple[PatchSweeps, torch.Tensor, torch.Tensor]:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    return sweeps_of(model, photographs(64, 1).double(), gamma=0.1)


def guessed(sweeps: PatchSweeps, patches: torch.Tensor) -> torch.Tensor:
    """Coefficients of the seen patches, a tenth of a deviation off, and the mean where a patch was never seen."""
    truth, unseen = sweeps.coefficients(patches), sweeps.known.unseen
    draw = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = truth + truth[~unseen].std(dim=0) * draw / 10
    start[unseen] = truth[~unseen].mean(dim=0)
    return start


def test_seen_patches_are_certified_among_wrong_ones(case) -> None:
    """With known attention, hardly a patch is certified as long as unseen ones are unknown."""
    sweeps, patches, scales = case
    start, seen = guessed(sweeps, patches), ~sweeps.known.unseen
    found, *_ = AttendedSearch()(sweeps, start, scales)
    error = ((found.patches - patches) * scales).square().mean(dim=1).sqrt()
    assert torch.equal(found.found, seen)
    assert float(error[seen].max()) < 1e-3
    assert not sweeps.swept(sweeps.sweep(start, 4)).found.any()


def test_expected_deviations_cover_the_errors(case) -> None:
    sweeps, patches, scales = case
    found, *_ = AttendedSearch()(sweeps, guessed(sweeps, patches), scales)
    error = ((found.patches - patches) * scales).square().mean(dim=1).sqrt()[found.found]
    expected = found.deviation[found.found]
    assert float(expected.max()) < VOUCHED_DEVIATION
    assert float((error / expected).median()) < 3
    assert not found.deviation[~found.found].isfinite().any()


@pytest.fixture(scope="module")
def sent() -> tuple[PatchSweeps, torch.Tensor, torch.Tensor]:
    """A message in float32."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    return sweeps_of(model, photographs(64, 3)[2:], gamma=0.1)


def test_class_and_register_tokens_need_no_patch(sent) -> None:
    sweeps, patches, scales = sent
    truth = normalised(sweeps.attended(sweeps.coefficients(patches)))[: sweeps.prefix]
    prefix = AttendedSearch()(sweeps, guessed(sweeps, patches), scales)[-1]
    assert len(prefix) == sweeps.prefix == 1
    assert float((normalised(prefix) - truth).norm(dim=1).max()) < 1e-2 * truth.shape[1] ** 0.5


def test_tokens_that_were_never_seen_are_found_in_what_the_seen_ones_leave(sent) -> None:
    sweeps, patches, scales = sent
    truth = normalised(sweeps.attended(sweeps.coefficients(patches)))[sweeps.prefix :][sweeps.known.unseen]
    apart, tokens, _, prefix = AttendedSearch()(sweeps, guessed(sweeps, patches), scales)
    assert not (apart.found & sweeps.known.unseen).any()
    found, _ = TokenSearch(rounds=24, starts=1).beside(sweeps.block, tokens, prefix)
    distances = torch.cdist(truth, found.y).amin(dim=1) / truth.shape[1] ** 0.5
    assert int((distances < 1e-2).sum()) >= len(truth) - 1


def test_linear_equations_leave_the_truth_in_the_family(case) -> None:
    """What the search varies, and what it takes from the equations, against the attention that the client computed."""
    sweeps, patches, _ = case
    block, c, seen = sweeps.block, sweeps.coefficients(patches), ~sweeps.known.unseen
    scales = AttentionScales.guessed(sweeps, c)
    tokens, attended = sweeps.tokens(c), sweeps.attended(c)[sweeps.prefix :][seen]
    own = tokens[sweeps.prefix :][seen]
    family = AttendedFamily(sweeps, scales, torch.eye(c.shape[1], dtype=torch.float64), 20.0, 0.0)
    # The true token lies in the family around a start that is off, up to the noise.
    moved = own + 0.1 * sweeps.family.directions[:1]
    along = scales.along(block, own, tokens)
    start = moved + block.attention_branch(along @ block.attention.directions[:, :-1]) + block.attention_bias
    start = start - family._outside(start) @ family.solve @ family.rows
    left = attended - start
    left = left - (left @ family.solved) @ family.family.directions
    assert float(left.norm(dim=1).max()) < 1e-3 * float((attended - moved).norm(dim=1).min())
    assert len(family.free) < len(family.rows)


def test_what_is_certified_from_a_senseless_guess_is_right(case) -> None:
    sweeps, patches, scales = case
    found, *_ = AttendedSearch()(sweeps, sweeps.coefficients(patches) * 1e6, scales)
    error = ((found.patches - patches) * scales).square().mean(dim=1).sqrt()
    assert found.found.any()
    assert float(error[found.deviation.isfinite()].max()) < 1e-3


def test_results_of_two_searches_are_joined(case) -> None:
    known = case[0].known
    one = torch.ones(1, dtype=torch.float64)
    first = PlacedPatches.none(known).extended(torch.tensor([2]), known.rows[2:3] + 1, one, one)
    second = PlacedPatches.none(known).extended(torch.tensor([2, 3]), known.rows[2:4] - 1, 2 * one, 2 * one)
    joined = first.completed(second, torch.zeros_like(known.unseen))
    assert joined.found.nonzero()[:, 0].tolist() == [2, 3]
    assert torch.equal(joined.patches[2:4], known.rows[2:4] + torch.tensor([[1.0], [-1.0]]))
    assert joined.deviation[2:4].tolist() == [1, 2]
    assert joined.patches[0].isnan().all()


def test_what_another_search_found_in_another_order_is_neither_lost_nor_repeated(case) -> None:
    known = case[0].known
    places = known.unseen.nonzero()[:, 0]
    one = torch.ones(len(places), dtype=torch.float64)
    patches = known.rows[places] + torch.arange(len(places))[:, None]
    complete = PlacedPatches.none(known).extended(places, patches.flip(0), one, one)
    # This search lacks two of the patches, and holds something near one of them.
    near = PlacedPatches.none(known).extended(places[2:], patches[2:], one[2:], one[2:])
    near.patches[places[0]] = patches[0] + 0.1
    joined = near.completed(complete, known.unseen)
    assert torch.equal(joined.patches[places], patches)
    assert joined.found[known.unseen].all()
    assert not joined.found[~known.unseen].any()


def test_patches_that_sweeps_exchanged_are_taken_together(case) -> None:
    """One of each place alone repeated some of the patches that no update shows, and lost others."""
    known = case[0].known
    places = torch.arange(len(known.rows))
    low, high = torch.full((len(places),), 1.0).double(), torch.full((len(places),), 2.0).double()
    apart = PlacedPatches.none(known).extended(places, known.rows, low, low)
    swept = PlacedPatches.none(known).extended(places, known.rows + 1, high, high)
    taken = better(apart, swept, known.unseen)
    assert torch.equal((taken.patches == swept.patches).all(dim=1), known.unseen)
    near = PlacedPatches.none(known).extended(places, known.rows + 1, 1.2 * low, 1.2 * low)
    assert torch.equal(better(apart, near, known.unseen).patches, near.patches)


@pytest.mark.long  # the table of MJP attacks holds the same on 50 photographs
def test_deit_s_at_224() -> None:
    """A median of 80 dB over the visible patches when this was written; those of the sky are open up to the noise."""
    model = build_model("deit_s_mjp", num_classes=10, weights="random", dal="none")
    view, mask, moved = masked_update(model, photographs(224, 1), gamma=0.1)
    answer = ATTACKS.get("unmix")()([view])
    tokenizer = find_tokenizer(view.model, view.image_shape)
    off = tokenizer.patchify(model.normalise(answer.images) - model.normalise(moved))[0]
    error = off[~mask] / 4  # a deviation is about 0.25
    psnr = -10 * error.square().mean(dim=1).log10()
    assert float(psnr.median()) > 60
    assert float((psnr > 25).double().mean()) > 0.95
