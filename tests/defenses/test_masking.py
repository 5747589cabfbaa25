"""Block-wise masks and jigsaws: exact counts, whole sets, shapes of blocks, and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmjp.defenses.masking import block_masks, count_masked, jigsaw_order, move_patches


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100), st.integers(1, 5), st.integers(2, 16), st.integers(2, 16), st.integers(0, 1000))
def test_exact_count_for_any_ratio_and_grid(percent: int, batch: int, rows: int, columns: int, seed: int) -> None:
    gamma = percent / 100
    mask = block_masks(batch, (rows, columns), gamma, generator(seed))
    assert mask.shape == (batch, rows * columns)
    assert (mask.sum(dim=1) == count_masked(gamma, rows * columns)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100), st.integers(1, 5), st.integers(0, 1000))
def test_jigsaw_permutes_the_chosen_set_only(percent: int, batch: int, seed: int) -> None:
    draw = generator(seed)
    mask = block_masks(batch, (6, 7), percent / 100, draw)
    order = jigsaw_order(mask, draw)
    places = torch.arange(42).expand(batch, -1)
    assert torch.equal(order.sort(dim=1).values, places)
    assert torch.equal(order[~mask], places[~mask])
    assert mask.gather(1, order).equal(mask)


def test_masks_are_blocks() -> None:
    """Chosen patches have far more chosen neighbours than the same number strewn at random would (gamma = 0.3)."""
    mask = block_masks(200, (14, 14), 0.3, generator()).view(200, 14, 14).float()
    together = (mask[:, :, 1:] * mask[:, :, :-1]).sum() / (200 * 14 * 13)
    assert float(together) > 1.5 * 0.3**2


def test_images_of_a_batch_draw_their_own() -> None:
    masks = block_masks(50, (14, 14), 0.5, generator())
    assert len({tuple(m.tolist()) for m in masks}) == 50
    assert torch.equal(masks, block_masks(50, (14, 14), 0.5, generator()))


def test_every_permutation_is_as_likely() -> None:
    mask = torch.tensor([[True, False, True, True]]).expand(6000, -1)
    order = jigsaw_order(mask, generator())
    counts = torch.unique(order, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert (counts.double() - 1000).abs().max() < 150


def test_moves_patches_like_a_loop() -> None:
    images = torch.rand(3, 3, 12, 8)
    order = torch.stack([torch.randperm(6, generator=generator(i)) for i in range(3)])
    expected = images.clone()
    for b in range(3):
        for place in range(6):
            y, x = divmod(place, 2)
            sy, sx = divmod(int(order[b, place]), 2)
            expected[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = images[
                b, :, 4 * sy : 4 * sy + 4, 4 * sx : 4 * sx + 4
            ]
    assert torch.equal(move_patches(images, order, 4), expected)


@pytest.mark.parametrize(("gamma", "count"), [(0.0, 0), (0.1, 20), (0.5, 98), (0.9, 176), (1.0, 196)])
def test_counts_at_224(gamma: float, count: int) -> None:
    assert count_masked(gamma, 196) == count
