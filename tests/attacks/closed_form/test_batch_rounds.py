"""Images of small batches are separated by the steps that share one, and refused where the count forbids it."""

from __future__ import annotations

import copy
import dataclasses
from statistics import median

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks import ATTACKS, Observation, Reconstruction, find_tokenizer
from attacks.closed_form import batch_rounds
from attacks.closed_form.batch_rounds import find_groups, fit, largest_misfit, read_step, steps_needed
from fedmjp.data import load_data
from fedmjp.defenses import DEFENSES
from fedmjp.defenses.masking import block_masks, jigsaw_order, move_patches
from fedmjp.metrics import score
from fedmjp.models import build_model
from tests.conftest import observe, photographs, shared_file

# Of six images each pair meets at most once, and every image is in three steps.
PAIRS = [(0, 1), (2, 3), (4, 5), (1, 2), (3, 4), (5, 0), (0, 3), (1, 4), (2, 5)]


@pytest.fixture(scope="module")
def exact():
    model = build_model("vit_mini_64", num_classes=8, weights="random")
    model.module.double()
    return model


@pytest.fixture(scope="module")
def images():
    return photographs(64, 6).double()


@pytest.fixture(scope="module")
def views(exact, images) -> dict[tuple[int, ...], Observation]:
    return {pair: observe(exact, images[list(pair)]) for pair in PAIRS}


def attack(views, *pairs, **options):
    return ATTACKS.get("batch_rounds")(**options)([views[p] for p in pairs])


def error(found, images, pair) -> float:
    """Largest error over the batch, in the better of both orders."""
    truth = images[list(pair)]
    return min(float((found.images - t).abs().max()) for t in (truth, truth.flip(0)))


def best_psnr(found, truth) -> float:
    """PSNR of the worst image of `truth`, each against its best reconstruction."""
    return min(max(float(score(f[None], t[None], patch_size=8)["psnr"][0]) for f in found) for t in truth)


def test_equations_hold_for_every_image_and_agree_with_the_true_spans(exact, images, views) -> None:
    tokenizer = find_tokenizer(exact.module, (3, 64, 64))
    x = tokenizer.patchify(exact.normalise(images))  # (6, N, P)
    steps = {pair: read_step(view) for pair, view in views.items()}
    for (a, b), step in steps.items():
        span = np.linalg.qr((x[b] - x[a]).numpy().T)[0].T
        np.testing.assert_allclose((step.basis.T @ step.basis).numpy(), span.T @ span, atol=1e-5)
    # The oracle knows the images and stacks the equations of three steps into one least-squares problem.
    shared = [pair for pair in PAIRS if 0 in pair]
    spans = [np.linalg.qr((x[b] - x[a]).numpy().T)[0] for a, b in shared]
    left = np.vstack([np.eye(tokenizer.patch_dim) - q @ q.T for q in spans])
    right = np.vstack(
        [(np.eye(tokenizer.patch_dim) - q @ q.T) @ x[max(p)].numpy().T for q, p in zip(spans, shared, strict=True)]
    )
    oracle = np.linalg.lstsq(left, right, rcond=1e-13)[0].T
    np.testing.assert_allclose(oracle, x[0].numpy(), atol=1e-6)
    assert fit([steps[p] for p in shared], ridge=1e-13).misfit < 1e-9


def test_exact_on_float64(views, images) -> None:
    found = attack(views, *PAIRS)
    assert found.diagnosis == ""
    assert found.known.all()
    assert found.details["identified"] == 2
    assert error(found, images, PAIRS[-1]) < 1e-6


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(len(PAIRS) - 1)), again=st.lists(st.integers(0, len(PAIRS) - 2), max_size=3))
def test_order_and_repetition_change_nothing(views, images, order, again) -> None:
    earlier = [PAIRS[i] for i in [*order, *again]]
    found = attack(views, *earlier, PAIRS[-1])
    assert found.details["identified"] == 2
    assert error(found, images, PAIRS[-1]) < 1e-6


def test_weights_may_change_in_between(images) -> None:
    views = {}
    for seed, pair in enumerate(PAIRS):
        model = build_model("vit_mini_64", num_classes=8, weights="random", seed=seed)
        model.module.double()
        views[pair] = observe(model, images[list(pair)])
    assert error(attack(views, *PAIRS), images, PAIRS[-1]) < 1e-6


def test_groups_are_those_that_share_an_image(exact, views) -> None:
    steps = [read_step(views[pair]) for pair in PAIRS]
    tokenizer = find_tokenizer(exact.module, (3, 64, 64))
    groups = list(find_groups(steps[-1], steps[:-1], tokenizer, tolerance=1e-3, max_trials=100))
    members = [{PAIRS[i] for i, s in enumerate(steps) if any(s.rows is g.rows for g in group)} for group in groups]
    assert len(members) == 2
    assert {frozenset(set.intersection(*map(set, m))) for m in members} == {frozenset({2}), frozenset({5})}
    assert all(len(m) == 3 for m in members)


def test_only_one_image_comes_back(views, images) -> None:
    found = attack(views, (0, 1), (2, 3), (1, 2), (2, 5))
    assert "the batch holds 2 images; 1 could be identified" in found.diagnosis
    assert found.known[0].all()
    assert not found.known[1].any()
    assert float((found.images[0] - images[2]).abs().max()) < 1e-6


def test_the_same_batch_again_says_nothing_new(views) -> None:
    found = attack(views, (2, 5), (2, 5), (2, 5))
    assert "0 could be identified" in found.diagnosis
    assert not found.known.any()


@pytest.mark.parametrize("change", ["mirrored", "shifted", "both"])
def test_images_in_other_views(exact, change: str) -> None:
    """Each image of the last batch stands in two earlier ones in another view; its partners there do not move along."""
    scenes = photographs(80, 6).double()
    plain = scenes[..., 8:72, 8:72]
    moved = scenes[..., 8:72, 16:80] if change != "mirrored" else plain
    moved = moved.flip(-1) if change != "shifted" else moved
    pairs = [(2, 3), (5, 0), (1, 2), (4, 5), (2, 5)]
    sent = [observe(exact, torch.stack([moved[a], plain[b]])) for a, b in pairs[:-1]]
    found = ATTACKS.get("batch_rounds")()([*sent, observe(exact, plain[[2, 5]])])
    assert found.details["identified"] == 2
    # In the last pair but one image 5 is not moved, and in the third neither is 2: each is moved in one of its steps.
    inside = found.images[..., 8:] if change != "mirrored" else found.images
    truth = plain[[2, 5]][..., 8:] if change != "mirrored" else plain[[2, 5]]
    assert min(float((inside - t).abs().max()) for t in (truth, truth.flip(0))) < 1e-5


def test_shifts_by_a_pixel_are_not_joined(exact) -> None:
    scenes = photographs(80, 4).double()
    sent = [observe(exact, scenes[[0, b], :, 8:72, 7 + b : 71 + b]) for b in (2, 3)]
    found = ATTACKS.get("batch_rounds")()([*sent, observe(exact, scenes[:2, :, 8:72, 8:72])])
    assert found.details["identified"] == 0


def withheld(view: Observation) -> Observation:
    return dataclasses.replace(view, gradients={n: g for n, g in view.gradients.items() if n != "pos_embed"})


def test_without_position_gradient_every_image_fulfils_the_equations(exact, images, views) -> None:
    tokenizer = find_tokenizer(exact.module, (3, 64, 64))
    x = tokenizer.patchify(exact.normalise(images))  # (6, N, P)
    for a, b in PAIRS[:2]:
        step = read_step(withheld(views[a, b]))
        # Conditions of tokens (but one, for the scale of each) and of patches; 128 with the position gradient.
        assert step.equations == (193 - 2 * 65 - 1) + (193 - 2 * 64)
        own, other = (float(step.sums.misfit(x[i]).sum() / step.sums.squares.sum()) for i in (a, (b + 1) % 6))
        assert own < 1e-6 < 1e-2 < other
        span = np.linalg.qr((x[b] - x[a]).numpy().T)[0].T
        free = step.basis.numpy()
        np.testing.assert_allclose(span - span @ free.T @ free, 0, atol=1e-3)


def test_frozen_positions_are_read_as_withheld_ones(exact, views) -> None:
    frozen = copy.deepcopy(exact.module)
    frozen.pos_embed.requires_grad_(False)
    trained = withheld(views[PAIRS[0]])
    step, same = read_step(dataclasses.replace(trained, model=frozen)), read_step(trained)
    assert step.equations == same.equations
    torch.testing.assert_close(step.rows, same.rows)


def test_without_position_gradient_batches_are_separated(exact, images, views) -> None:
    found = ATTACKS.get("batch_rounds")()([withheld(views[pair]) for pair in PAIRS])
    assert found.diagnosis == ""
    assert found.details["identified"] == 2
    assert best_psnr(found.images, images[list(PAIRS[-1])].float()) > 50


def test_hidden_positions_are_not_read_from_spans(images) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    mask = block_masks(2, model.grid, 0.1, torch.Generator().manual_seed(0))
    found = ATTACKS.get("batch_rounds")()([withheld(observe(model, images[:2].float(), mask=mask))])
    assert "which images of the batch hide which positions cannot be read" in found.diagnosis


def test_strangers_do_not_fit(views) -> None:
    found = attack(views, (0, 1), (3, 4), (0, 3), (2, 5))
    assert "too few hold an image of the last one" in found.diagnosis
    assert not found.known.any()


def test_steps_of_images_that_hardly_differ_are_not_joined() -> None:
    """What the messages' noise explains decides: a share of 4e-3, the largest allowed, is too wide for these."""
    trained, images = build_model("vit_mini_64", num_classes=8, weights="auto"), photographs(64, 4)
    likeness = (images[:1] + 0.05 * (images[3:] - 0.5)).clamp(0, 1)
    same, other = (observe(trained, torch.cat([one, images[1:2]])) for one in (images[:1], likeness))
    target = read_step(observe(trained, images[[0, 2]]))
    right, wrong = (fit([target, read_step(view)], tolerance=4e-3) for view in (same, other))
    assert right.shares_image(4e-3)
    assert right.misfit < 0.1 * largest_misfit(right.explained, 4e-3)
    assert 3 * largest_misfit(wrong.explained, 4e-3) < wrong.misfit < 4e-3
    found = ATTACKS.get("batch_rounds")()([other, observe(trained, images[[0, 2]])])
    assert not found.known.any()
    assert "too few hold an image of the last one" in found.diagnosis


def test_noise_widens_the_limit_up_to_the_tolerance(mini) -> None:
    torch.manual_seed(0)
    view = observe(mini, photographs(64, 2))
    noisy = dataclasses.replace(
        view, gradients={n: g + 1e-5 * g.std() * torch.randn_like(g) for n, g in view.gradients.items()}
    )
    clean, rough = (read_step(one).errors.sum() for one in (view, noisy))
    assert rough > 30 * clean
    assert largest_misfit(1e-12, 4e-3) == 1e-5 < largest_misfit(1e-7, 4e-3) < largest_misfit(1e-2, 4e-3) == 4e-3


def test_a_single_image_needs_no_other_step(exact, images) -> None:
    found = ATTACKS.get("batch_rounds")()([observe(exact, images[:1])])
    assert found.diagnosis == ""
    assert float((found.images - images[:1]).abs().max()) < 1e-6


def test_other_clients_do_not_count(views) -> None:
    others = [dataclasses.replace(views[p], client=7) for p in PAIRS[:-1]]
    found = ATTACKS.get("batch_rounds")()([*others, views[PAIRS[-1]]])
    assert "1 readable steps hold too few equations" in found.diagnosis


def test_states_the_count_that_must_hold(exact, images) -> None:
    found = ATTACKS.get("batch_rounds")()([observe(exact, images[:3])])
    assert "spans 128 directions" in found.diagnosis
    assert "D - N = 192 - 64 = 128" in found.diagnosis
    assert found.images is None


def test_steps_needed_counts_equations(exact, views, monkeypatch) -> None:
    first, second, *_ = (read_step(v) for v in views.values())
    assert first.equations == 192 - 64
    assert steps_needed(first, [second]) == 2
    assert steps_needed(first, []) == 2
    with_mask = dataclasses.replace(first, basis=torch.eye(192, dtype=torch.float64)[:130])
    assert steps_needed(with_mask, [with_mask] * 5) == 4
    tokenizer = find_tokenizer(exact.module, (3, 64, 64))
    monkeypatch.setattr(batch_rounds, "best_view", None)  # too few equations: no pair of steps is compared
    assert list(find_groups(with_mask, [with_mask], tokenizer, tolerance=1e-3, max_trials=100)) == []


@pytest.mark.parametrize("own", [False, True])
def test_jigsawed_batches(images, own: bool) -> None:
    """One mask for the batch, as in MJP's released code, or one for each image."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    generator = torch.Generator().manual_seed(0)
    views = []
    for pair in PAIRS:
        mask = block_masks(2 if own else 1, model.grid, 0.1, generator)
        order = jigsaw_order(mask, generator)
        mask, order = mask.expand(2, -1), order.expand(2, -1)
        views.append(observe(model, move_patches(images[list(pair)], order, model.patch_size), mask=mask))
    found = ATTACKS.get("batch_rounds")()(views)
    assert found.details["identified"] == 2
    assert best_psnr(found.images, images[list(PAIRS[-1])]) > 50


@pytest.mark.parametrize(("unit", "size", "words"), [("clip", 1e-3, "(noise, or"), ("entry", 1e-4, "")])
def test_of_a_noisy_single_image_patches_that_are_sure_are_vouched_for(unit: str, size: float, words: str) -> None:
    model, image = build_model("vit_mini_32", num_classes=8, weights="auto"), photographs(32, 6)[4:5]
    view = observe(model, image)
    noise = DEFENSES.get("noise")(noise_unit=unit, noise_multiplier=size, clip_norm=30.0)
    sent = noise.on_update(dict(view.gradients), torch.Generator().manual_seed(0))
    found = ATTACKS.get("batch_rounds")()([dataclasses.replace(view, gradients=sent)])
    wrong = (found.images - image).square().mean(dim=1, keepdim=True).reshape(8, 4, 8, 4).mean(dim=(1, 3)) > 10**-2.5
    vouched = found.known.reshape(8, 4, 8, 4)[:, 0, :, 0]
    assert words in found.diagnosis
    assert wrong.any()
    assert not (vouched & wrong).any()
    assert vouched.any() == (not words)


def test_single_images_that_hide_patches_are_joined_and_not_vouched_for(images) -> None:
    """Another image may fit as well: over many updates of other images one does."""
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    model.module.double()
    generator, views = torch.Generator().manual_seed(0), []
    for _ in range(3):
        mask = block_masks(1, model.grid, 0.1, generator)
        moved = move_patches(images[:1], jigsaw_order(mask, generator), model.patch_size)
        views.append(observe(model, moved, mask=mask))
    found = ATTACKS.get("batch_rounds")()(views)
    assert found.details["identified"] == 1
    assert "mjp_rounds decides it" in found.diagnosis
    assert not found.known.any()


def test_float32_above_50_db(mini) -> None:
    images = photographs(64, 6)
    found = ATTACKS.get("batch_rounds")()([observe(mini, images[list(pair)]) for pair in PAIRS])
    assert found.known.all()
    assert best_psnr(found.images, images[list(PAIRS[-1])]) > 50


@pytest.mark.parametrize(("size", "pixels", "threshold"), [(2, 224, 60.0), (3, 112, 40.0)])
def test_vit_b(size: int, pixels: int, threshold: float) -> None:
    """Image i of the last batch meets `size` - 1 strangers in each of its three steps."""
    folder = shared_file("data/imagenet-sample")
    images = load_data(f"folder:{folder}", size=pixels, train_limit=16).train.images(list(range(16)))
    model = build_model("vit_b", num_classes=8, weights="random", image_size=pixels)
    del model.module.blocks[4:]  # the attack reads the first
    strangers = iter(range(size, len(images)))
    batches = [(i, *(next(strangers) for _ in range(size - 1))) for _ in range(2) for i in range(size)]
    observations = [observe(model, images[list(b)]) for b in [*batches, range(size)]]

    def attacked(views: list[Observation]) -> tuple[Reconstruction, list[float]]:
        """The answer, and the PSNR of each image against its best reconstruction."""
        found = ATTACKS.get("batch_rounds")()(views)
        return found, [
            max(float(score(f[None], t[None], patch_size=16)["psnr"][0]) for f in found.images) for t in images[:size]
        ]

    found, values = attacked(observations)
    assert found.known.all(), found.diagnosis
    assert median(values) > threshold, values
    if size == 2:  # without positions one of the two images is not identified here, which is said
        found, values = attacked([withheld(view) for view in observations])
        assert "1 could be identified" in found.diagnosis
        assert max(values) > 40.0, values
