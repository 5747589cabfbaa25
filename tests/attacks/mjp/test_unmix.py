"""The whole image from one masked update: spans of the first MLP, separation of masked patches, placement."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import ATTACKS, Observation, UsageError, find_tokenizer
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.jigsaw_solver import _Board, border_costs, place
from attacks.mjp.mlp_spans import outside, read_first_block
from attacks.mjp.span_search import KnownPatches, SpanSearch, UnknownTokens, distinct_optima, most_spanning, refine
from fedmjp.data import load_data
from fedmjp.defenses.masking import block_masks, jigsaw_order, move_patches
from fedmjp.metrics import score
from fedmjp.models import ViT, build_model
from tests.conftest import observe, photographs, shared_file


def masked_update(model, image, gamma: float, seed: int = 0) -> tuple[Observation, torch.Tensor, torch.Tensor]:
    """The update of one jigsawed step, its mask (N,) and the jigsawed image."""
    generator = torch.Generator().manual_seed(seed)
    mask = block_masks(1, model.grid, gamma, generator)
    moved = move_patches(image, jigsaw_order(mask, generator), model.patch_size)
    return observe(model, moved, mask=mask), mask[0], moved


def psnr(found, image) -> float:
    return float(score(found.to(image), image, patch_size=8)["psnr"][0])


@pytest.fixture(scope="module")
def exact():
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    return model


@pytest.fixture(scope="module")
def exact_update(exact):
    return masked_update(exact, photographs(64, 1).double(), gamma=0.1)


def test_block_sees_what_the_client_saw(exact, exact_update) -> None:
    view, mask, moved = exact_update
    tokenizer = find_tokenizer(view.model, view.image_shape)
    block = read_first_block(view, tokenizer)
    seen: dict[str, torch.Tensor] = {}
    layers = {"fc1": exact.module.blocks[0].mlp.fc1, "fc2": exact.module.blocks[0].mlp.fc2}
    hooks = [m.register_forward_pre_hook(lambda _, x, n=n: seen.__setitem__(n, x[0][0])) for n, m in layers.items()]
    with torch.no_grad():
        exact.module(exact.normalise(moved), mask[None])
    for hook in hooks:
        hook.remove()
    tokens = block.tokens(tokenizer.patchify(exact.normalise(moved))[0], mask)
    attended = tokens + block.attend(tokens, tokens)
    torch.testing.assert_close(block.module.norm2(attended), seen["fc1"])
    assert float(block.residuals(attended).abs().max()) < 1e-6
    # A stranger's inputs lie outside both spans.
    for inputs, span in zip(seen.values(), block.spans, strict=True):
        assert float(outside(inputs.flip(1), span).norm()) > 0.1 * float(inputs.norm())


def test_curvature_agrees_with_automatic_differentiation(exact_update) -> None:
    view, _, _ = exact_update
    block = read_first_block(view, find_tokenizer(view.model, view.image_shape))
    generator = torch.Generator().manual_seed(0)
    attended = torch.randn(2, 192, generator=generator, dtype=torch.float64)
    directions = torch.randn(3, 192, generator=generator, dtype=torch.float64)
    matrix, gradient = block.curvature(attended, directions)
    for i in range(2):
        along = torch.func.jacfwd(lambda c, i=i: block.residuals(attended[i : i + 1] + c @ directions)[0])
        jacobian = along(torch.zeros(3, dtype=torch.float64))  # (equations, 3)
        residual = block.residuals(attended[i : i + 1])[0]
        torch.testing.assert_close(matrix[i], jacobian.T @ jacobian)
        torch.testing.assert_close(gradient[i], jacobian.T @ residual)


def test_truth_is_the_minimum(exact, exact_update) -> None:
    view, mask, moved = exact_update
    tokenizer = find_tokenizer(view.model, view.image_shape)
    update = solve_masked(read_position_rows(view))
    known = KnownPatches(update.rows, update.basis, update.masked, update.masked)
    tokens = UnknownTokens(known, read_first_block(view, tokenizer))
    patches = tokenizer.patchify(exact.normalise(moved))[0]
    truth = tokens.coordinates(patches - tokens.rows)
    torch.testing.assert_close(tokens.patches(truth), patches, atol=1e-6, rtol=0)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, loss = refine(tokens, truth + 0.05 * truth.std() * noise, steps=12)
    assert loss < 1e-10
    torch.testing.assert_close(tokens.patches(found), patches, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_whole_image_in_float64(exact_update) -> None:
    view, mask, _ = exact_update
    image = photographs(64, 1).double()
    found = ATTACKS.get("unmix")()([view])
    assert found.diagnosis == ""
    assert psnr(found.images, image) > 60
    known = torch.nn.functional.interpolate((~mask).view(1, 1, 8, 8).double(), scale_factor=8) > 0
    assert torch.equal(found.known, known)


def test_float32_beats_the_image_prior() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    image = photographs(64, 2)[1:]
    view, _, _ = masked_update(model, image, gamma=0.1)
    ours, prior = (psnr(ATTACKS.get(name)()([view]).images, image) for name in ("unmix", "mjp_subspace"))
    assert ours > 60
    assert ours > prior + 10


@pytest.mark.slow
def test_does_not_vouch_for_a_fit_that_failed() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    view, _, _ = masked_update(model, photographs(64, 1), gamma=0.5)
    found = ATTACKS.get("unmix")(search=SpanSearch(rounds=1, steps=1))([view])
    assert "no image was found whose tokens lie in the spans of the first MLP's gradients" in found.diagnosis
    assert not found.known.any()


def test_says_which_block_or_width_does_not_do() -> None:
    april = build_model("vit_mini_64_mjp", num_classes=8, weights="random", block="april")
    april.module.double()
    view, _, _ = masked_update(april, photographs(64, 1).double(), gamma=0.1)
    found = ATTACKS.get("unmix")()([view])
    assert found.images is None
    assert "is not timm's pre-norm block (no norm1)" in found.diagnosis
    narrow = ViT(img_size=64, patch_size=8, embed_dim=64, depth=1, num_heads=2, num_classes=4)
    view = dataclasses.replace(view, model=narrow)
    with pytest.raises(UsageError, match="65 tokens in 64 channels"):
        read_first_block(view, find_tokenizer(narrow, view.image_shape))


def test_distinct_ends_and_spanning_points() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    optima = truth.repeat(6, 1) + 1e-7 * torch.randn(30, 4, generator=generator, dtype=torch.float64)
    losses = 1e-6 * (1 + torch.arange(30, dtype=torch.float64))
    kept = distinct_optima(optima, losses, torch.eye(4, dtype=torch.float64).expand(30, 4, 4))
    assert len(kept) == 5
    torch.testing.assert_close(kept, optima[:5])
    losses[3::5] = 1.0  # all starts that ended at the fourth point stopped short
    assert len(distinct_optima(optima, losses, torch.eye(4, dtype=torch.float64).expand(30, 4, 4))) == 4
    mixed = torch.cat([0.5 * (truth[:1] + truth[1:2]), truth, truth.mean(dim=0, keepdim=True)])
    chosen = most_spanning(mixed, 5)
    assert torch.linalg.matrix_rank(torch.cat([chosen, torch.ones(5, 1, dtype=torch.float64)], dim=1)) == 5


def pieces_of(image, mask, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches (N, P) with the masked ones shuffled, and the order that undoes it."""
    tokenizer = find_tokenizer(build_model("vit_mini_64", num_classes=2, weights="random").module, (3, 64, 64))
    order = jigsaw_order(mask[None], torch.Generator().manual_seed(seed))[0]
    return tokenizer, tokenizer.patchify(image)[0][order], order.argsort()


@pytest.mark.parametrize("index", range(3))
def test_pieces_find_their_holes(index: int) -> None:
    image = photographs(64, 3)[index : index + 1].double()
    mask = torch.zeros(64, dtype=torch.bool)
    mask.view(8, 8)[2:5, 2:6] = True
    tokenizer, patches, _ = pieces_of(image, mask, seed=index)
    placed = tokenizer.unpatchify(patches[place(tokenizer, patches, mask)][None])
    assert psnr(placed, image) > 30


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), share=st.floats(0.0, 0.4))
def test_placement_is_a_permutation_that_never_costs_more(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(64, generator=generator) < share
    tokenizer, patches, _ = pieces_of(photographs(64, 1).double(), mask, seed)
    order = place(tokenizer, patches, mask)
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(order[~mask], torch.arange(64)[~mask])
    pieces = patches.reshape(64, 3, 8, 8)
    board = _Board(tokenizer.grid, *border_costs(pieces))
    assert board.total(order) <= board.total(torch.arange(64)) + 1e-9


@pytest.mark.slow
def test_deit_s_at_224_from_one_update() -> None:
    folder = shared_file("data/imagenet-sample")
    image = load_data(f"folder:{folder}", size=224, train_limit=2).train.images([0])
    model = build_model("deit_s_mjp", num_classes=8, weights="random")
    view, _, _ = masked_update(model, image, gamma=0.1)
    ours, prior = (psnr(ATTACKS.get(name)()([view]).images, image) for name in ("unmix", "mjp_subspace"))
    assert ours > prior + 4, (ours, prior)  # a hard one: most photographs come back above 45 dB
