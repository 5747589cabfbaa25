"""One update with masked positions: what must come back exactly, what the prior adds, what the attack refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import ATTACKS, Observation, find_tokenizer
from attacks.closed_form.patch_embedding import PatchEmbedding
from attacks.linear.confidence import RIGHT_DB
from attacks.linear.image_prior import VectorialVariation, _Scene
from attacks.linear.least_squares import solve_rows
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import masked_rows, position_gradient, read_position_rows
from attacks.memory import remember
from fedmjp.defenses.masking import block_masks, jigsaw_order, move_patches
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from fedmjp.models.vit import ViT
from fedmjp.objectives import client_loss
from tests.conftest import observe, photographs


@pytest.fixture(scope="module")
def exact() -> BuiltModel:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    model.module.double()
    return model


def jigsawed(model: BuiltModel, image: torch.Tensor, gamma: float, seed: int = 0, **changes) -> Observation:
    """The update of one MJP step; gamma 0 is an unjigsawed one."""
    generator = torch.Generator().manual_seed(seed)
    mask = block_masks(1, model.grid, gamma, generator)
    moved = move_patches(image, jigsaw_order(mask, generator), model.patch_size)
    return observe(model, moved, mask=mask, **changes)


def with_dal(model: BuiltModel, image: torch.Tensor, weight: float, seed: int = 0) -> Observation:
    """As `jigsawed` at gamma 0.1, with the localisation loss."""
    view = jigsawed(model, image, 0.1, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = block_masks(1, model.grid, 0.1, generator)
    moved = move_patches(image, jigsaw_order(mask, generator), model.patch_size)
    loss = client_loss(model, moved, torch.arange(1), mask, {"dal": weight})
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}
    return dataclasses.replace(view, gradients=gradients)


def patches_of(model: BuiltModel, image: torch.Tensor) -> torch.Tensor:
    return find_tokenizer(model.module, (3, 64, 64)).patchify(model.normalise(image))[0].double()


def sent_rows(view: Observation) -> torch.Tensor:
    """The patches' rows of the position gradient as sent, (N, D)."""
    tokenizer = find_tokenizer(view.model, view.image_shape)
    return position_gradient(view, tokenizer)[tokenizer.prefix :]


def read(view: Observation):
    rows = read_position_rows(view)
    return solve_masked(rows), rows.tokenizer


@settings(max_examples=12, deadline=None)
@given(gamma=st.floats(0.0, 0.9), seed=st.integers(0, 1000))
def test_every_patch_is_exact_off_the_basis(exact: BuiltModel, gamma: float, seed: int) -> None:
    image = photographs(64, 1).double()
    update, _ = read(jigsawed(exact, image, gamma, seed))
    x = patches_of(exact, image)
    off = (update.rows - x) - (update.rows - x) @ update.basis.T @ update.basis
    # Tiny singular values make a basis shorter than the span by what they weigh, hence not 1e-12.
    assert float(off.abs().max()) < 1e-6
    hidden = int(update.masked.sum())
    assert update.rank == hidden
    # The constant pixel takes one direction out of the span.
    assert len(update.basis) == max(hidden - 1, 0)


def test_the_span_is_that_of_the_masked_patches(exact: BuiltModel) -> None:
    image = photographs(64, 1).double()
    update, _ = read(jigsawed(exact, image, 0.2))
    masked = patches_of(exact, image)[update.masked]
    oracle = torch.linalg.svd(masked - masked.mean(dim=0))[2][: len(masked) - 1]
    torch.testing.assert_close(update.basis.T @ update.basis, oracle.T @ oracle, atol=1e-6, rtol=0)


def test_a_uniform_background_hides_nothing(exact: BuiltModel) -> None:
    image = photographs(64, 1).double()
    image[..., :40] = 0.3
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[:, 1:5, 1:4] = True
    found = ATTACKS.get("mjp_subspace")()([observe(exact, image, mask=mask.flatten(1))])
    assert found.diagnosis == ""
    assert found.known.all()
    assert float((found.images - image).abs().max()) < 1e-6


def test_spread_is_the_size_of_the_error(exact: BuiltModel) -> None:
    scores = []
    for i, image in enumerate(photographs(64, 6).double()):
        update, _ = read(jigsawed(exact, image[None], 0.1, seed=i))
        error = (patches_of(exact, image[None]) - update.rows) @ update.basis.T / update.spread
        scores.append(error[~update.masked].square().flatten())
    assert 0.3 < float(torch.cat(scores).median()) < 3


def test_completion_beats_the_centre_and_the_naive_solve() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    values = []
    for i, image in enumerate(photographs(64, 6)):
        view = jigsawed(model, image[None], 0.1, seed=i)
        update, tokenizer = read(view)
        centre = view.to_pixels(tokenizer.unpatchify(update.rows[None])).float()
        found = (ATTACKS.get("mjp_subspace")()([view]).images, centre, PatchEmbedding()([view]).images)
        values.append([float(psnr(x, image[None])) for x in found])
    aware, centre, naive = torch.tensor(values).median(dim=0).values.tolist()
    assert aware > centre + 3 > naive + 3, values


@pytest.mark.parametrize("kind", ["linear", "nonlinear", "pca"])
def test_localisation_loss_is_found_and_removed(kind: str) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal=kind)
    image = photographs(64, 1)
    clean, dirty = jigsawed(model, image, 0.1), with_dal(model, image, 0.01)
    honest, rows = sent_rows(clean), sent_rows(dirty)
    removed = read_position_rows(dirty)
    assert removed.dal_weight == pytest.approx(0.01, rel=1e-3)
    assert removed.imbalance < 1e-4
    aware = float((removed.rows - honest).norm() / honest.norm())
    naive = float((rows - honest).norm() / honest.norm())
    assert aware < 1e-4 < 1e-3 < naive
    # Without the model's DAL map the attack cannot compute the term: it fails, and says so.
    blind = ATTACKS.get("mjp_subspace")()([dataclasses.replace(dirty, model=without_dal(model))])
    found = ATTACKS.get("mjp_subspace")()([dirty])
    assert found.diagnosis == ""
    assert float(psnr(found.images, image)) > float(psnr(blind.images, image)) + 3
    assert "something else than tokens contributes to them" in blind.diagnosis
    assert not blind.known.any()


WITHHELD = ("patch_embed.proj.bias", "unk_embed")


@pytest.mark.parametrize("name", WITHHELD)
@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
def test_without_the_balance_the_heads_gradient_shows_the_localisation_loss(kind: str, name: str) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal=kind)
    honest, view = sent_rows(jigsawed(model, photographs(64, 1), 0.1)), with_dal(model, photographs(64, 1), 0.01)
    view = dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != name})
    for sent in (view, remember(view)):  # as it came, and as it is kept for later rounds
        removed = read_position_rows(sent)
        assert removed.dal_weight == pytest.approx(0.01, rel=1e-3)
        assert float((removed.rows - honest).norm() / honest.norm()) < 1e-4
        assert removed.doubts == ()


@pytest.mark.parametrize("name", WITHHELD)
def test_what_shows_nowhere_is_not_vouched_for(name: str) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="linear")
    view = with_dal(model, photographs(64, 1), 0.01)
    kept = {n: g for n, g in view.gradients.items() if n != name and not n.startswith("dal.")}
    found = ATTACKS.get("mjp_subspace")()([dataclasses.replace(view, gradients=kept)])
    assert "whether the position rows hold a localisation loss does not show" in found.diagnosis
    assert not found.known.any()


def without_dal(model: BuiltModel) -> torch.nn.Module:
    plain = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none").module
    plain.load_state_dict({n: v for n, v in model.module.state_dict().items() if not n.startswith("dal.")})
    return plain


def test_no_localisation_loss_is_invented(exact: BuiltModel) -> None:
    view = jigsawed(exact, photographs(64, 1).double(), 0.3)
    cleaned = read_position_rows(view)
    assert cleaned.dal_weight == 0.0
    assert torch.equal(cleaned.rows, sent_rows(view))


@pytest.mark.parametrize(("own", "large"), [(False, False), (True, False), (True, True)])
def test_conjugate_gradients_agree_with_a_dense_solve(exact: BuiltModel, own: bool, large: bool, monkeypatch) -> None:
    if large:  # the diagonal preconditioner of problems with many open directions
        monkeypatch.setattr("attacks.linear.block_inverses.LARGE", 0)
    update, tokenizer = read(jigsawed(exact, photographs(64, 1).double(), 0.05))
    estimate = update.estimate()
    if own:  # each patch with precisions of its own
        powers = torch.linspace(0.9, 1.1, 64, dtype=torch.float64)[:, None]
        estimate = dataclasses.replace(estimate, precision=estimate.precision**powers)
    scene = _Scene(tokenizer, (0.2, 0.2, 0.3), estimate)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(64, 64, generator=generator, dtype=torch.float64) + 0.1
    zero = torch.zeros_like(update.estimate().centre)
    found = scene.step(zero, weights, iterations=2000, tolerance=1e-10)

    def energy(shift: torch.Tensor) -> torch.Tensor:
        down, right = scene.gradient(shift)
        return (weights * (down.square() + right.square())).sum() / 2 + (scene.precision * shift.square()).sum() / 2

    flat = zero.flatten()
    gradient = torch.func.grad(lambda v: energy(v.view_as(zero)))
    dense = torch.func.jacfwd(gradient)(flat)
    oracle = -torch.linalg.solve(dense, gradient(flat)).view_as(zero)
    torch.testing.assert_close(found, oracle, atol=1e-6, rtol=1e-5)


def test_small_patches_that_may_hide_anything() -> None:
    model = build_model("vit_mini_32_mjp", num_classes=8, weights="random")
    view = jigsawed_32(model, gamma=0.9)
    found = ATTACKS.get("mjp_subspace")()([view])
    assert "patches have only 48 values" in found.diagnosis
    assert not found.known.any()
    assert ATTACKS.get("mjp_subspace")()([jigsawed_32(model, gamma=0.3)]).diagnosis == ""


def test_without_the_biases_gradient_a_patch_has_no_constant_pixel() -> None:
    """As many patches are hidden as one has values: with dL/db that is one less than too many, without it is not."""
    model = build_model("vit_mini_32_mjp", num_classes=8, weights="random", dal="none")
    view = observe(model, photographs(32, 1), mask=torch.arange(64)[None] < 48)
    sent = {n: g for n, g in view.gradients.items() if n != "patch_embed.proj.bias"}
    assert not read(view)[0].boundless
    assert read(dataclasses.replace(view, gradients=sent))[0].boundless


def jigsawed_32(model: BuiltModel, gamma: float) -> Observation:
    mask = block_masks(1, (8, 8), gamma, torch.Generator().manual_seed(0))
    return observe(model, photographs(32, 1), mask=mask)


def test_nothing_is_vouched_for_with_all_masked(exact: BuiltModel) -> None:
    view = jigsawed(exact, photographs(64, 1).double(), 1.0)
    found = ATTACKS.get("mjp_subspace")()([view])
    assert found.diagnosis
    assert found.images is None or not found.known.any()


@pytest.mark.parametrize("relative", [1e-4, 1e-3, 1e-2, 1e-1])
def test_ridge_against_a_noisy_gradient(relative: float) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    image = photographs(64, 1)
    view = observe(model, image)
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: g + relative * g.square().mean().sqrt() * torch.randn(g.shape, generator=generator)
        for n, g in view.gradients.items()
    }
    view = dataclasses.replace(view, gradients=noisy)
    aware = ATTACKS.get("mjp_subspace")()([view]).images
    rows = solve_rows(noisy["pos_embed"][:, 1:], noisy["patch_embed.proj.weight"].flatten(1)[None], rcond=1e-15)[0].rows
    plain = view.to_pixels(find_tokenizer(model.module, (3, 64, 64)).unpatchify(rows[None])).float()
    assert float(psnr(aware, image)) > float(psnr(plain, image))


@pytest.mark.parametrize("relative", [1e-5, 1e-4, 1e-3])
def test_the_mask_shows_through_noise(relative: float) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    view = jigsawed(model, photographs(64, 1), 0.2)
    generator = torch.Generator().manual_seed(0)
    rows = sent_rows(view)
    noisy = rows + relative * rows.square().mean().sqrt() * torch.randn(rows.shape, generator=generator)
    assert torch.equal(masked_rows(noisy), masked_rows(rows))
    assert int(masked_rows(rows).sum()) == 13


def test_no_mask_is_invented(exact: BuiltModel) -> None:
    for i, image in enumerate(photographs(64, 6).double()):
        assert not masked_rows(sent_rows(jigsawed(exact, image[None], 0.0, seed=i))).any()


def narrow(width: int) -> BuiltModel:
    """A ViT of 64 patches and few channels."""
    torch.manual_seed(0)
    module = ViT(img_size=64, patch_size=8, embed_dim=width, depth=1, num_heads=1, num_classes=10).eval()
    return BuiltModel(module, "narrow", "standard", 64, 8, (0.5,) * 3, (0.25,) * 3, "random")


@pytest.mark.parametrize("name", ["mjp_subspace", "mjp_rounds", "unmix"])
@pytest.mark.parametrize(("width", "noise"), [(48, 0.0), (60, 0.0), (66, 2e-7)])
def test_no_wrong_patch_of_an_unmasked_update_is_vouched_for(name: str, width: int, noise: float) -> None:
    """With fewer channels than patches, or equations so few that noise of the size of round-off counts."""
    model, image = narrow(width), photographs(64, 3)[2:]
    view, generator = observe(model, image), torch.Generator().manual_seed(0)
    size = noise * torch.cat([g.flatten() for g in view.gradients.values()]).square().mean().sqrt()
    sent = {n: g + size * torch.randn(g.shape, generator=generator) for n, g in view.gradients.items()}
    found = ATTACKS.get(name)()([dataclasses.replace(view, gradients=sent)])
    if width < 64:
        assert "some patches stay mixed" in found.diagnosis
        assert found.images is None or not found.known.any()
        return
    cut = find_tokenizer(model.module, (3, 64, 64)).patchify
    wrong = cut((found.images - image).square())[0].mean(dim=1) > 10 ** (-RIGHT_DB / 10)
    vouched = cut(found.known.expand(-1, 3, -1, -1).float())[0].amin(dim=1) > 0
    assert found.diagnosis == ""
    assert wrong.any()
    assert not (wrong & vouched).any()
    assert int(vouched.sum()) > 50


@pytest.mark.long  # the table of MJP attacks holds the same on 50 photographs
def test_deit_s_at_224() -> None:
    model = build_model("deit_s_mjp", num_classes=8, weights="random")
    values = []
    for i, image in enumerate(photographs(224, 6)):
        found = ATTACKS.get("mjp_subspace")()([jigsawed(model, image[None], 0.1, seed=i)])
        assert found.diagnosis == ""
        values.append(float(psnr(found.images, image[None])))
    assert sorted(values)[3] > 22, values


def test_prior_is_exchangeable(exact: BuiltModel) -> None:
    view = jigsawed(exact, photographs(64, 1).double(), 0.1)
    one, two = (ATTACKS.get("mjp_subspace")(prior=VectorialVariation(strength=s))([view]) for s in (1.0, 30.0))
    assert not torch.equal(one.images, two.images)
