"""What a noisy update shows of its noise and of its mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attacks import Observation
from attacks.linear.errors_in_variables import marginal_misfit
from attacks.linear.noisy_update import noise_of, noisy_system, read_noisy_update, rows_of_noise
from attacks.linear.position_rows import masked_rows
from fedmjp.defenses import DEFENSES
from fedmjp.models import build_model
from tests.conftest import observe, photographs

MASK = torch.arange(64)[None] % 3 == 0


@pytest.fixture(scope="module")
def view() -> Observation:
    """A step with every third position masked, with the localisation loss and without noise."""
    built = build_model("vit_mini_32_mjp", num_classes=10, weights="auto", dal="nonlinear")
    return observe(built, photographs(32, 1), torch.tensor([2]), MASK)


def noised(view: Observation, share: float, seed: int = 0) -> tuple[Observation, float]:
    """The update under noise, and its standard deviation."""
    defence = DEFENSES.get("noise")(noise_multiplier=share, noise_unit="entry", clip_norm=1e9)
    entries = torch.cat([g.flatten() for g in view.gradients.values()])
    sent = defence.on_update(dict(view.gradients), torch.Generator().manual_seed(seed))
    return dataclasses.replace(view, gradients=sent), share * float(entries.square().mean().sqrt())


@pytest.mark.parametrize("share", [1e-3, 1e-2, 1e-1, 1.0])
def test_masked_rows_are_found_under_noise(view, share: float) -> None:
    """All of them, and of visible ones those that no noise hides."""
    sent, deviation = noised(view, share)
    found = read_noisy_update(sent)
    assert found.masked[MASK[0]].all()
    rows = view.gradients["pos_embed"][0, 1:].double()
    plain = rows.square().mean(dim=1).sqrt() > 2 * deviation
    assert not found.masked[plain].any()
    assert noise_of(found) == pytest.approx(deviation, rel=0.2)
    assert torch.equal(found.rows[found.masked], torch.zeros_like(found.rows[found.masked]))


def test_lengths_alone_no_longer_show_them(view) -> None:
    """So that reading the noise is what finds them."""
    sent, _ = noised(view, 1.0)
    assert not masked_rows(sent.gradients["pos_embed"][0, 1:]).any()


def test_a_term_in_the_rows_does_not_hide_visible_patches() -> None:
    draws = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 192, generator=draws, dtype=torch.float64)
    rows[10:] *= 20
    assert rows_of_noise(rows, 1.0).tolist() == [True] * 10 + [False] * 20
    assert rows_of_noise(rows, 100.0).tolist() == [True] * 10 + [False] * 20  # noise that no row leaves room for


def test_one_covariance_for_all_channels_is_the_sum_over_channels(view) -> None:
    """The fast path against the same system with a negligibly larger bound in one channel, which takes the slow one."""
    system = noisy_system(read_noisy_update(noised(view, 1e-2)[0]))
    uneven = system.factor_bounds.clone()
    uneven[0, 0] *= 1 + 1e-9
    near = torch.randn(64, system.products.shape[1] - 1, generator=torch.Generator().manual_seed(1)).double()
    fast, slow = (marginal_misfit(one, near) for one in (system, dataclasses.replace(system, factor_bounds=uneven)))
    assert fast[0] == pytest.approx(slow[0], rel=1e-6)
    torch.testing.assert_close(fast[1], slow[1], rtol=1e-5, atol=1e-6 * float(slow[1].abs().max()))
