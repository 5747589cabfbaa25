"""Block-wise masks and jigsaws: exact counts, whole sets, shapes of blocks, and independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmjp.defenses.masking import block_masks, count_masked, jigsaw_order, move_patches, released_masks


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


def released_by_loops(rows: int, columns: int, gamma: float, draw: torch.Generator) -> tuple[torch.Tensor, int]:
    """One mask of the released procedure, patch by patch, and how many rectangles were tried in vain at its end."""
    mask, chosen, wanted, misses = [[False] * columns for _ in range(rows)], 0, int(rows * columns * gamma), 0
    while chosen < wanted and misses < 10:
        area, aspect, top, left = torch.rand(4, 1, generator=draw)[:, 0].tolist()
        most = min(wanted - chosen, 75)
        area, aspect = 8 + area * (most - 8), 0.3 ** (1 - 2 * aspect)
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        top, left = int(top * (rows - height + 1)), int(left * (columns - width + 1))
        block = [(y, x) for y in range(top, top + height) for x in range(left, left + width)]
        inside = height < rows and width < columns
        new = [place for place in block if not mask[place[0]][place[1]]] if inside else []
        if 0 < len(new) <= most:
            chosen, misses = chosen + len(new), 0
            for y, x in new:
                mask[y][x] = True
        else:
            misses += 1
    return torch.tensor(mask).flatten(), misses


@pytest.mark.parametrize(("grid", "gamma"), [((14, 14), 0.9), ((14, 14), 0.1), ((8, 8), 0.5), ((4, 7), 0.3)])
def test_released_masks_equal_a_loop_over_patches(grid: tuple[int, int], gamma: float) -> None:
    for seed in range(40):
        expected, _ = released_by_loops(*grid, gamma, generator(seed))
        assert torch.equal(released_masks(1, grid, gamma, generator(seed))[0], expected)


@pytest.mark.long
def test_released_masks_give_up_and_each_image_on_its_own() -> None:
    """At 0.9 most masks fall short of floor(0.9 * 196) = 176, by ten misses in a row; no image waits for another."""
    masks = released_masks(300, (14, 14), 0.9, generator())
    counts = masks.sum(dim=1)
    alone = torch.tensor([int(released_masks(1, (14, 14), 0.9, generator(s)).sum()) for s in range(300)])
    assert counts.max() <= 176
    assert len({tuple(m.tolist()) for m in masks}) == 300
    assert float(counts.double().mean()) == pytest.approx(float(alone.double().mean()), abs=1.5)
    assert all(released_by_loops(14, 14, 0.9, generator(s))[1] == 10 for s in range(300) if alone[s] < 176)
    assert 0.3 < float((alone < 176).double().mean()) < 1


def test_jigsaw_of_sets_of_different_sizes() -> None:
    """Each set is permuted among itself, uniformly, and sets of one size as if they were alone."""
    rows = [[True, False, True, True], [False, True, False, True], [False] * 4]
    mask = torch.tensor(rows)
    orders = torch.stack([jigsaw_order(mask, generator(s)) for s in range(1200)])
    for row, images, least in zip(mask, orders.unbind(1), (150, 500, 1200), strict=True):
        kinds, counts = torch.unique(images, dim=0, return_counts=True)
        assert len(kinds) == math.factorial(int(row.sum()))
        assert int(counts.min()) >= least
        assert (kinds[:, ~row] == torch.arange(4)[~row]).all()


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
