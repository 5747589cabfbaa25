"""Equations of views against stacked least squares for each patch, and mixtures of channels found from row spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import find_tokenizer
from attacks.linear.image_prior import VectorialVariation, _Scene
from attacks.linear.normal_equations import NormalEquations
from attacks.linear.position_rows import read_position_rows
from attacks.linear.row_space import RowSpace
from attacks.linear.views import View, all_shifts, mirror, mix_channels, places
from fedmjp.models import build_model
from tests.conftest import observe, photographs

SIZE = 64
MIX = torch.tensor([[0.9, 0.2, -0.1], [0.05, 1.1, 0.1], [-0.2, 0.1, 0.8]], dtype=torch.float64)
OFFSET = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64)


@pytest.fixture(scope="module")
def model():
    built = build_model("vit_mini_64", num_classes=8, weights="random")
    built.module.double()
    return built


@pytest.fixture(scope="module")
def tokenizer(model):
    return find_tokenizer(model.module, (3, SIZE, SIZE))


def test_places_are_those_of_the_moved_image(tokenizer) -> None:
    image = torch.rand(1, 3, SIZE, SIZE)
    side = tokenizer.patch_size
    moved = torch.zeros_like(image)
    moved[..., : SIZE - side, 2 * side :] = image[..., side:, : SIZE - 2 * side]  # up by one patch, right by two
    whole, view = tokenizer.patchify(image)[0], tokenizer.patchify(moved.flip(-1))[0]
    source = places(tokenizer.grid, True, (-1, 2))
    inside = source >= 0
    assert int(inside.sum()) == 7 * 6
    torch.testing.assert_close(mirror(view, tokenizer)[source[inside]], whole[inside])
    assert all_shifts(tokenizer.grid, False, 1)[0].tolist() == list(range(64))


@settings(max_examples=8, deadline=None)
@given(
    mirrored=st.booleans(),
    shift=st.tuples(st.integers(-2, 2), st.integers(-2, 2)),
    hidden=st.integers(60, 120),
    seed=st.integers(0, 99),
)
def test_views_agree_with_stacked_least_squares(tokenizer, mirrored, shift, hidden, seed) -> None:
    """The oracle writes every update's equations down in its own pixels, patch by patch."""
    generator = torch.Generator().manual_seed(seed)
    n, p = tokenizer.num_patches, tokenizer.patch_dim
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    view = View(places(tokenizer.grid, mirrored, shift), mirrored, MIX, OFFSET)
    plain = View.of(tokenizer, torch.arange(n))
    sums = NormalEquations(n, p)
    seen = torch.randn(n, p, generator=generator, dtype=torch.float64)  # what else the shifted image shows
    inside = view.source >= 0
    own = mix_channels(x - OFFSET.repeat_interleave(p // 3), torch.linalg.inv(MIX))
    seen[view.source[inside]] = (mirror(own, tokenizer) if mirrored else own)[inside]
    stacks = []
    for shown, patches in ((plain, x), (view, seen)):
        basis = torch.linalg.qr(torch.randn(p, hidden, generator=generator, dtype=torch.float64))[0].T
        one = NormalEquations(n, p)
        one.add(patches + torch.randn(n, hidden, generator=generator, dtype=torch.float64) @ basis, basis)
        sums.merge(shown.moved(one, tokenizer))
        stacks.append((basis, one))
    estimate = sums.solve(noise=1e-6)
    # The map from x to a view's patch, column by column, from the definition.
    unit = torch.eye(p, dtype=torch.float64)
    columns = mix_channels(unit, torch.linalg.inv(MIX))
    linear = (mirror(columns, tokenizer) if mirrored else columns).T.numpy()
    shifted = linear @ OFFSET.repeat_interleave(p // 3).numpy()
    for patch in (0, 27, 63):
        off = [np.eye(p) - (b.T @ b).numpy() for b, _ in stacks]
        left, right = [off[0]], [stacks[0][1].targets[patch].numpy()]
        if inside[patch]:
            left.append(off[1] @ linear)
            right.append(stacks[1][1].targets[view.source[patch]].numpy() + off[1] @ shifted)
        oracle, _, rank, _ = np.linalg.lstsq(np.vstack(left), np.concatenate(right), rcond=1e-10)
        found = estimate.patches()[patch].numpy()
        if rank == p:
            np.testing.assert_allclose(found, oracle, atol=1e-5)
            np.testing.assert_allclose(found, x[patch].numpy(), atol=1e-5)
        else:  # right wherever this patch has an equation
            np.testing.assert_allclose(np.vstack(left) @ found, np.concatenate(right), atol=1e-5)
    assert float(sums.misfit(x).abs().max()) < 1e-8


def test_precision_of_patches_with_different_equations(tokenizer) -> None:
    """The prior's Hessian holds each patch's own inverse covariance."""
    generator = torch.Generator().manual_seed(0)
    n, p = tokenizer.num_patches, tokenizer.patch_dim
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    sums = NormalEquations(n, p)
    for shift in ((0, 0), (1, 0), (0, -1)):
        one, source = NormalEquations(n, p), places(tokenizer.grid, False, shift)
        basis = torch.linalg.qr(torch.randn(p, 70, generator=generator, dtype=torch.float64))[0].T
        seen = torch.zeros_like(x)
        seen[source[source >= 0]] = x[source >= 0]
        one.add(seen, basis)
        sums.merge(View.of(tokenizer, source).moved(one, tokenizer))
    estimate = sums.solve(noise=1e-3)
    assert estimate.precision.shape == (n, len(estimate.open), len(estimate.open))
    scene = _Scene(tokenizer, (0.5, 0.5, 0.5), estimate)
    shift = 1e-3 * torch.randn(estimate.centre.shape, generator=generator, dtype=torch.float64)
    expected = torch.stack([c @ q @ c for c, q in zip(shift, estimate.precision, strict=True)])
    torch.testing.assert_close((scene._weighed(shift) * shift).sum(dim=1), expected)
    settled = VectorialVariation(smoothing=(None,), iterations=400, tolerance=1e-10).settle(
        estimate, tokenizer, (0.5, 0.5, 0.5)
    )
    # Patches that are known in all directions stay where their equations put them.
    sure = torch.linalg.eigvalsh(estimate.precision)[:, 0] > 1e3
    assert sure.any()
    assert float((settled.patches - estimate.patches())[sure].abs().max()) < 0.1


def test_finds_the_mixture_of_channels(model, tokenizer) -> None:
    images = photographs(SIZE, 3).double()
    offset = OFFSET[:, None, None] / 10
    recoloured = torch.einsum("dc,chw->dhw", torch.linalg.inv(MIX), images[0] - offset)
    target, same, other = (read_position_rows(observe(model, x[None])) for x in (images[0], recoloured, images[1]))
    space = RowSpace.of(target)
    assert not space.holds(same)
    mix = space.mix_of(same)
    std = torch.tensor(model.std, dtype=torch.float64)
    expected = MIX * std / std[:, None]  # of normalised pixels
    scale = float((mix * expected).sum() / expected.square().sum())
    torch.testing.assert_close(mix / scale, expected, atol=1e-6, rtol=0)
    assert space.mix_of(same, mirrored=True) is None
    assert space.mix_of(other) is None
    mirrored = read_position_rows(observe(model, recoloured.flip(-1)[None]))
    assert space.mix_of(mirrored) is None
    torch.testing.assert_close(space.mix_of(mirrored, mirrored=True), mix, atol=1e-7, rtol=0)


def test_a_grey_image_is_recoloured_as_little_as_possible(model) -> None:
    grey = photographs(SIZE, 1).double().mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    space, darker = (RowSpace.of(read_position_rows(observe(model, 0.2 + s * grey))) for s in (0.7, 0.5))
    mix = space.mix_of(darker.update)
    torch.testing.assert_close(mix / mix[0, 0], torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)
