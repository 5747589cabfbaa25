"""The whole image from one masked update: tokens from the first MLP, their patches, placement."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import jacfwd

from attacks import ATTACKS, Observation, UsageError, find_tokenizer
from attacks.certificate import certify
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.mjp.jigsaw_solver import _Board, border_costs
from attacks.mjp.known_attention import OUT_OF_RANGE, PatchSweeps, SweepSearch, most_spanning
from attacks.mjp.mlp_spans import FirstBlock, read_first_block
from attacks.mjp.mlp_tokens import TokenFamily
from attacks.mjp.placement import Placement
from attacks.mjp.token_duals import coordinates, dual_vectors, normalised
from attacks.mjp.token_patches import KnownPatches, TokenPatches
from attacks.mjp.token_search import TokenSearch
from attacks.mjp.unmix import pixel_limits
from fedmjp.defenses.masking import block_masks, jigsaw_order, move_patches
from fedmjp.metrics import any_place, score
from fedmjp.models import ViT, build_model
from tests.attacks.mjp.conftest import Nothing, without
from tests.conftest import observe, photographs

LONG = pytest.mark.long


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


@pytest.fixture(scope="module")
def inputs(exact, exact_update) -> dict[str, torch.Tensor]:
    """What the layers of the first block's MLP received, (N', inputs)."""
    seen: dict[str, torch.Tensor] = {}
    mlp = exact.module.blocks[0].mlp
    layers = {"fc1": mlp.fc1, "fc2": mlp.fc2}
    hooks = [m.register_forward_pre_hook(lambda _, x, n=n: seen.__setitem__(n, x[0][0])) for n, m in layers.items()]
    with torch.no_grad():
        exact.module(exact.normalise(exact_update[2]), exact_update[1][None])
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture(scope="module")
def block(exact_update) -> FirstBlock:
    view = exact_update[0]
    return read_first_block(view, find_tokenizer(view.model, view.image_shape))


@pytest.fixture(scope="module")
def truth(inputs, block) -> torch.Tensor:
    """Every token at the second norm, (N', D)."""
    norm = block.module.norm2
    return normalised((inputs["fc1"] - norm.bias) / norm.weight)


def test_block_sees_what_the_client_saw(exact, exact_update, inputs, block) -> None:
    view, mask, moved = exact_update
    tokenizer = find_tokenizer(view.model, view.image_shape)
    tokens = block.tokens(tokenizer.patchify(exact.normalise(moved))[0], mask)
    torch.testing.assert_close(block.module.norm2(tokens + block.attend(tokens)), inputs["fc1"])
    torch.testing.assert_close(block.attend(tokens[7:9], tokens), block.attend(tokens)[7:9])
    for seen, span in zip(inputs.values(), block.spans, strict=True):
        assert float(span.outside(seen, 1.0).abs().max()) < 1e-6
        # A stranger's inputs lie outside both spans.
        assert float(span.outside(seen.flip(1), 1.0).norm()) > 0.1 * float(seen.norm())


def test_normal_equations_agree_with_automatic_differentiation(block) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, 192, generator=generator, dtype=torch.float64)
    family = TokenFamily(block, torch.randn(3, 192, generator=generator, dtype=torch.float64))
    matrix, gradient = family.matrices(y), family.gradients(y, torch.zeros(2, dtype=torch.float64))

    def residuals(u: torch.Tensor, i: int) -> torch.Tensor:
        first = block.module.norm2(y[i : i + 1] + u @ family.directions)
        hidden = block.module.mlp.act(block.module.mlp.fc1(first))
        return torch.cat([span.outside(a, 1.0)[0] for a, span in zip((first, hidden), block.spans, strict=True)])

    for i in range(2):
        zero = torch.zeros(3, dtype=torch.float64)
        jacobian, residual = jacfwd(lambda u, i=i: residuals(u, i))(zero), residuals(zero, i)
        torch.testing.assert_close(matrix[i], jacobian.T @ jacobian)
        torch.testing.assert_close(gradient[i], jacobian.T @ residual)
        torch.testing.assert_close(family.losses(y)[0][i], residual.square().sum())


def test_dual_vectors_single_out_their_token(block, truth) -> None:
    some = [5, 17, 40]  # the class token, number 0, weighs too much in the sums for an exact one
    products = dual_vectors(block, truth[some]) @ coordinates(block, truth).T  # (3, N')
    own = products[range(3), some].abs()
    products[range(3), some] = 0
    assert (products.abs().amax(dim=1) < 1e-3 * own).all()


def test_random_starts_lead_to_the_tokens(block, truth) -> None:
    tokens = TokenSearch()(block, truth[:0])
    apart = torch.cdist(truth, tokens.y).min(dim=1).values / truth.shape[1] ** 0.5
    assert int((apart < 1e-3).sum()) >= 0.85 * len(truth)
    assert len(TokenSearch(rounds=0)(block, truth[:0])) == 0


def test_patches_and_places_of_known_tokens(exact, exact_update, block, truth) -> None:
    view, mask, moved = exact_update
    tokenizer = find_tokenizer(view.model, view.image_shape)
    known = known_patches(view)
    patches = tokenizer.patchify(exact.normalise(moved))[0]
    order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))
    system = TokenPatches(block, known, torch.ones(patches.shape[1], dtype=torch.float64))
    placed = system.solve(truth[order], torch.full_like(truth[:, 0], 1e-16))
    assert placed.found.all()
    torch.testing.assert_close(placed.patches[~mask], patches[~mask], atol=1e-3, rtol=0)
    apart = torch.cdist(patches[mask], placed.patches[mask])
    assert float(apart.min(dim=1).values.max()) < 1e-2
    assert sorted(apart.argmin(dim=1).tolist()) == list(range(int(mask.sum())))


def known_patches(view: Observation) -> KnownPatches:
    """What the linear equations of one masked update give."""
    update = solve_masked(read_position_rows(view))
    return KnownPatches(update.rows, update.basis, update.masked, update.masked)


def test_sweeps_return_to_the_patches(exact, exact_update, block) -> None:
    """From patches that are off by a tenth of a deviation, to less than the error that is expected."""
    view, _, moved = exact_update
    tokenizer, known = find_tokenizer(view.model, view.image_shape), known_patches(view)
    sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, view, known.rows.device))
    truth = sweeps.coefficients(tokenizer.patchify(exact.normalise(moved))[0])
    draw = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = sweeps.swept(truth + truth.std(dim=0) * draw / 10)
    found = SweepSearch().converged(sweeps, start.c, torch.zeros_like(known.masked))
    assert not start.found.any()
    assert found.found.all()
    expected = sweeps.deviation(found.c, torch.ones(known.rows.shape[1], dtype=torch.float64))  # (N,)
    error = (sweeps.patches(found.c) - sweeps.patches(truth)).square().mean(dim=1).sqrt()
    assert float(expected.max()) < 1e-3
    assert (error < expected).all()


def test_unseen_patches_are_found_among_the_others_and_frozen_places_stay(exact, exact_update, block) -> None:
    view, mask, moved = exact_update
    known, tokenizer = known_patches(view), find_tokenizer(view.model, view.image_shape)
    sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, view, known.rows.device))
    truth = sweeps.coefficients(tokenizer.patchify(exact.normalise(moved))[0])
    start = truth[mask] + 0.05 * truth[mask].flip(1)
    found, _ = sweeps.unseen(truth, start, 25)
    assert ((found - truth[mask]).norm(dim=1) < 0.5 * (start - truth[mask]).norm(dim=1)).all()
    swept = sweeps.sweep(truth + 0.1, 1, mask)
    assert torch.equal(swept[~mask], (truth + 0.1)[~mask])
    assert not torch.isclose(swept[mask], (truth + 0.1)[mask]).all(dim=1).any()


def test_points_within_the_span_of_others_are_taken_last() -> None:
    points = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.5, 0.0, 1.01], [0.0, 1.0, 1.0]])
    assert torch.equal(most_spanning(points, 3), points[[0, 1, 3]])
    assert torch.equal(most_spanning(points, 9)[-1], points[2])


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


def test_known_attention_finds_what_tokens_alone_leave_open() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    image = photographs(64, 3)[2:]
    view, _, _ = masked_update(model, image, gamma=0.1)
    alone, swept = (
        ATTACKS.get("unmix")(attend=Nothing(), sweep=sweep)([view]) for sweep in (SweepSearch(rounds=0), SweepSearch())
    )
    assert swept.details["found"] == 64 > alone.details["found"]
    assert psnr(swept.images, image) > psnr(alone.images, image) + 20  # 86.6 and 23.0 dB when this was written


def test_does_not_vouch_for_a_fit_that_failed() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    view, _, _ = masked_update(model, photographs(64, 1), gamma=0.8)
    found = ATTACKS.get("unmix")(search=TokenSearch(rounds=0, steps=1), sweep=SweepSearch(rounds=0))([view])
    assert "in the spans of its gradients" in found.diagnosis or "the first MLP's gradients admit" in found.diagnosis
    assert found.images is None or not found.known.any()


@pytest.mark.parametrize("gamma", [pytest.param(0.9, marks=LONG), 1.0])
def test_more_patches_are_masked_than_one_has_values(gamma: float) -> None:
    """58 and 64 of 64 patches of 48 values span everything; the first MLP singles them out all the same."""
    model = build_model("vit_mini_32_mjp", num_classes=10, weights="auto")
    image = photographs(32, 1)
    view, mask, _ = masked_update(model, image, gamma)
    solved = solve_masked(read_position_rows(view))
    assert solved.boundless
    assert solved.reasons
    found = ATTACKS.get("unmix")(placement=Placement(restarts=1))([view])
    assert found.diagnosis == ""
    assert float(any_place(found.images.to(image), image, 4)[0]) > 0.95
    vouched = torch.nn.functional.avg_pool2d(found.known.float(), 4).flatten()
    assert int(vouched.sum()) >= 0.8 * int((~mask).sum())  # of the visible patches, which stand in their places
    assert not vouched[mask].any()
    shown = find_tokenizer(view.model, view.image_shape).patchify(torch.cat([image, found.images.to(image)]))
    assert float((shown[0] - shown[1])[vouched > 0].abs().max() if vouched.any() else 0.0) < 0.01
    assert not solve_masked(read_position_rows(dataclasses.replace(view, num_examples=2))).boundless


def found_in(view: Observation, image: torch.Tensor, mask: torch.Tensor):
    """The answer of an attack that the suite would choose, with every patch in some place and the mask known."""
    attack = ATTACKS.get("unmix")(placement=Placement(restarts=1))
    assert attack.obstacle([view]) == ""
    assert attack.estimated_seconds([view]) > 1
    found = attack([view])
    assert found.diagnosis == ""
    assert found.details["masked"] == int(mask.sum())
    side = find_tokenizer(view.model, view.image_shape).patch_size
    assert float(any_place(found.images.to(image), image, side)[0]) > 0.95
    return found


@pytest.mark.parametrize(
    ("name", "gamma"), [pytest.param("vit_mini_64_mjp", 0.5, marks=LONG), ("vit_mini_32_mjp", 0.9)]
)
def test_the_position_gradient_is_withheld(name: str, gamma: float) -> None:
    """The spans of the first attention say which positions are masked."""
    model = build_model(name, num_classes=10, weights="auto" if "32" in name else "random")
    image, side = photographs(model.image_size, 2)[1:], model.patch_size
    view, mask, _ = masked_update(model, image, gamma)
    found = found_in(without(view, "pos_embed"), image, mask)
    right = torch.nn.functional.avg_pool2d((found.images.to(image) - image).square().mean(1), side).flatten() < 10**-2.5
    vouched = torch.nn.functional.avg_pool2d(found.known.float(), side).flatten() > 0
    assert int((vouched & ~mask).sum()) >= 0.8 * int((~mask).sum())
    assert not (vouched & mask).any()
    assert right[vouched].all()
    plain = without(observe(model, image), "pos_embed")
    assert "no position is masked: token_span gives the same answer" in ATTACKS.get("unmix")().obstacle([plain])


@pytest.mark.parametrize(("name", "gamma"), [("vit_mini_64", 0.0), pytest.param("vit_mini_32_mjp", 0.9, marks=LONG)])
def test_the_first_attention_is_withheld_as_well(name: str, gamma: float) -> None:
    """Every token tells by itself which place's embedding it bears, or that it bears the shared one."""
    model = build_model(name, num_classes=10 if "32" in name else 200, weights="auto")
    image = photographs(model.image_size, 2)[1:]
    view, mask, _ = masked_update(model, image, gamma) if gamma else (observe(model, image), torch.zeros(64) > 0, None)
    view = without(view, "pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias")
    found = found_in(view, image, mask)
    if not gamma:
        assert psnr(found.images, image) > 50
        assert found.known.all()
        assert certify(view, found)[0]
    two = dataclasses.replace(view, num_examples=2)
    assert "no position gradient" in ATTACKS.get("unmix")().obstacle([two])


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
    placed = tokenizer.unpatchify(patches[Placement()(tokenizer, patches, mask)][None])
    assert psnr(placed, image) > 30


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), share=st.floats(0.0, 0.4))
def test_placement_is_a_permutation_that_never_costs_more(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(64, generator=generator) < share
    tokenizer, patches, _ = pieces_of(photographs(64, 1).double(), mask, seed)
    order = Placement(restarts=1)(tokenizer, patches, mask)
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(order[~mask], torch.arange(64)[~mask])
    board = _Board(tokenizer.grid, border_costs(patches.reshape(64, 3, 8, 8)))
    assert board.total(order.numpy()) <= board.total(torch.arange(64).numpy()) + 1e-9


@pytest.mark.parametrize(("kind", "least"), [("float16", 10), pytest.param("int8", 0, marks=pytest.mark.long)])
def test_what_is_vouched_for_in_coarse_messages_is_right(kind: str, least: int) -> None:
    """Where tokens alone say which patch is where, and rounding makes some of them wrong."""
    model, image = build_model("vit_mini_32", num_classes=10, weights="auto"), photographs(32, 2)[1:]
    view = observe(model, image, labels=torch.tensor([3]))
    left = {n: g for n, g in view.gradients.items() if n != "pos_embed" and "attn.qkv" not in n}
    if kind == "int8":
        sent = {n: (g * 127 / g.abs().max()).round() * g.abs().max() / 127 for n, g in left.items()}
    else:
        sent = {n: g.half().float() for n, g in left.items()}
    found = ATTACKS.get("unmix")()([dataclasses.replace(view, gradients=sent)])
    pieces = torch.nn.functional.avg_pool2d(found.known.float(), 4) == 1
    error = torch.nn.functional.avg_pool2d((found.images - image).square().mean(dim=1, keepdim=True), 4).sqrt()
    right = error < 10 ** (-25 / 20)
    assert int(pieces.sum()) >= least
    assert not (pieces & ~right).any()
    assert float(right.float().mean()) > 0.9 if kind == "float16" else not right.all()


@pytest.mark.long
def test_half_precision_hides_rows_and_not_tokens() -> None:
    """The position rows have too few digits to tell the patches apart: tokens do, whatever their order."""
    image = photographs(64, 1)
    view, mask, _ = masked_update(build_model("vit_mini_64_mjp", num_classes=200, weights="auto"), image, gamma=0.1)
    sent = dataclasses.replace(view, gradients={n: g.half().float() for n, g in view.gradients.items()})
    assert solve_masked(read_position_rows(sent)).mixed
    found = ATTACKS.get("unmix")()([sent])
    pieces = torch.nn.functional.avg_pool2d(found.known.float(), 8) == 1
    error = torch.nn.functional.avg_pool2d((found.images - image).square().mean(dim=1, keepdim=True), 8).sqrt()
    assert float(any_place(found.images, image, 8)[0]) > 0.85  # 0.95 when this was written
    assert int(pieces.sum()) > 20
    assert (error[pieces] < 10 ** (-25 / 20)).all()
    assert not pieces.flatten()[mask.flatten()].any()


def test_a_patch_that_grows_without_bound_is_not_found(exact, exact_update, block) -> None:
    """Its token's direction is all that the spans see, whatever its length."""
    view, _, moved = exact_update
    tokenizer, known = find_tokenizer(view.model, view.image_shape), known_patches(view)
    sweeps = PatchSweeps(block, known, pixel_limits(tokenizer, view, known.rows.device))
    truth = sweeps.coefficients(tokenizer.patchify(exact.normalise(moved))[0])
    wild = truth.clone()
    wild[0] *= 1e4
    assert (sweeps.swept(truth).ratios < OUT_OF_RANGE).all()
    assert float(sweeps.swept(wild).ratios[0]) >= OUT_OF_RANGE
    assert not sweeps.swept(wild).found[0]


BY_ROUNDING = pytest.param(2, 0.1, 1.0, 0, marks=[pytest.mark.long, pytest.mark.xfail(reason="by rounding")])


@pytest.mark.parametrize(("layers", "gamma", "gain", "seed"), [(12, 0.04, 5.0, 0), BY_ROUNDING, (2, 0.1, 5.0, 1)])
def test_vit_ti_at_160_beats_the_prior(layers: int, gamma: float, gain: float, seed: int) -> None:
    """Under random weights: 57.1 and 36.8 dB when this was written; of two layers alone 45.1 and 23.7,
    and by the processor's rounding 22.1, 27.2 or 33.5 and 26.6 (29.7 before).

    There, patches a hundred times as large as pixels fit the spans as well (11.3 dB, if they are taken).
    """
    image = photographs(160, 1)
    model = build_model("vit_ti_mjp", num_classes=8, weights="random", image_size=160)
    del model.module.blocks[layers:]
    view, _, _ = masked_update(model, image, gamma=gamma, seed=seed)
    ours, prior = (psnr(ATTACKS.get(name)()([view]).images, image) for name in ("unmix", "mjp_subspace"))
    assert ours > prior + gain, (ours, prior)
