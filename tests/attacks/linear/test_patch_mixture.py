"""The mixture on patches: its fit, its norm, and its solve against slow independent computations."""

from __future__ import annotations

import pytest
import torch

from attacks import ATTACKS, UsageError
from attacks.linear import patch_mixture
from attacks.linear.image_prior import LUMA_CHROMA
from attacks.linear.masked_update import solve_masked
from attacks.linear.patch_mixture import MixturePrior, PatchMixture, fit_mixture, mean_free_basis, read_mixture
from attacks.linear.position_rows import read_position_rows
from fedmjp.models import build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed
from tests.conftest import photographs


def test_the_fit_separates_vertical_from_horizontal_stripes() -> None:
    """Patches that vary along one axis only: each component knows one kind, and each patch finds its component."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(4, 3, 64, 1, generator=draw).expand(-1, -1, -1, 64)
    columns = torch.rand(4, 3, 1, 64, generator=draw).expand(-1, -1, 64, -1)
    noise = 1e-3 * torch.randn(8, 3, 64, 64, generator=draw)
    images = torch.cat([rows, columns]) + noise
    mixture = fit_mixture(images, 2, patches=8000, iterations=30, seed=0)
    assert mixture.weights.tolist() == pytest.approx([0.5, 0.5], abs=0.05)
    colour = torch.tensor(LUMA_CHROMA)
    cut = [torch.nn.functional.unfold(torch.einsum("ij,bjhw->bihw", colour, x), 4)[0] for x in (rows, columns)]
    first, second = (mixture.best(mixture.norms(patches), 1e-3) for patches in cut)
    assert len(first.unique()) == len(second.unique()) == 1
    assert first[0] != second[0]


def test_norms_are_those_of_the_covariances() -> None:
    """|u|_k^2 = u' S_k^-1 u / d with S_k from the factors by a pseudo-inverse; a channel's mean does not count."""
    mixture, draw = read_mixture(""), torch.Generator().manual_seed(1)
    patches = torch.randn(48, 5, generator=draw)
    for k, factor in enumerate(mixture.factors.double()):
        covariance = torch.linalg.pinv(factor.T @ factor, hermitian=True, rtol=1e-9)
        free = mean_free_basis().T @ mean_free_basis() @ patches.double()
        expected = (free * torch.linalg.lstsq(covariance, free, driver="gelsd").solution).sum(dim=0) / 45
        torch.testing.assert_close(mixture.norms(patches)[k].double(), expected, rtol=2e-2, atol=0)
    lifted = patches + torch.arange(3).repeat_interleave(16)[:, None]
    torch.testing.assert_close(mixture.norms(lifted), mixture.norms(patches), rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(mixture.norms(3 * patches), 9 * mixture.norms(patches))


def test_a_step_minimises_the_weighted_norms_of_the_rendered_image() -> None:
    """Autograd on the loss, patch by patch, is zero at the solution, and not before."""
    view = jigsawed(build_model("vit_mini_64_mjp", num_classes=8, weights="random"), photographs(64, 1), 0.3)
    rows = read_position_rows(view)
    estimate, mixture = solve_masked(rows).estimate(), read_mixture("")
    scene = patch_mixture._Scene(mixture, estimate, rows.tokenizer, view.std)
    places = (64 - 4) // 2 + 1
    draw = torch.Generator().manual_seed(2)
    chosen = torch.randint(len(mixture.weights), (places**2,), generator=draw)
    weights = torch.rand(places**2, generator=draw)
    start = torch.zeros_like(estimate.centre).float()
    found = scene.step(start, chosen, weights, 4000, 1e-7)

    def slope(shift: torch.Tensor) -> float:
        """Norm of the loss's gradient; the picture is in RGB first, unlike the scene's."""
        shift = shift.double().requires_grad_()
        with torch.enable_grad():
            patches = estimate.patches(estimate.centre + shift)
            image = rows.tokenizer.unpatchify(patches[None])[0] * torch.tensor(view.std).double()[:, None, None]
            image = torch.einsum("ij,jhw->ihw", torch.tensor(LUMA_CHROMA).double(), image)
            loss = (estimate.precision * shift.square()).sum() / 2
            for place in range(places**2):
                y, x = 2 * (place // places), 2 * (place % places)
                patch = image[:, y : y + 4, x : x + 4].flatten()
                response = mixture.factors[chosen[place]].double() @ patch
                loss = loss + weights[place] * response.square().sum() / 2
            loss.backward()
        return float(shift.grad.norm())

    assert slope(found) < 1e-3 * slope(start)


def test_the_mixture_beats_total_variation_on_photographs_it_was_not_fitted_to(tmp_path) -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random")
    images = photographs(128, 8)  # quarters of the pictures, at another scale
    mixture = fit_mixture(images[4:], 8, patches=20_000, iterations=10, seed=0)
    mixture.save(tmp_path / "mixture.safetensors")
    gains = []
    for seed, image in enumerate(photographs(64, 4)):
        view = jigsawed(model, image[None], 0.3, seed=seed)
        visible = ~read_position_rows(view).masked.reshape(8, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
        prior = MixturePrior(mixture=str(tmp_path / "mixture.safetensors"))
        answers = (ATTACKS.get("mjp_mixture")(prior=prior)([view]), ATTACKS.get("mjp_subspace")()([view]))
        ours, plain = (-10 * (a.images[0] - image)[:, visible].square().mean().log10() for a in answers)
        assert answers[0].diagnosis == answers[1].diagnosis
        gains.append(float(ours - plain))
    assert sum(gains) / 4 > 0.3, gains


def test_what_is_no_mixture_is_refused_in_words(tmp_path) -> None:
    with pytest.raises(UsageError, match="holds no mixture; fit one with benchmarks/patch_mixture.py"):
        read_mixture(str(tmp_path / "none.safetensors"))
    PatchMixture(torch.ones(1), torch.ones(1, 5, 12)).save(tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match="of other patches than 4 x 4"):
        read_mixture(str(tmp_path / "other.safetensors"))
    with pytest.raises(UsageError, match="patches with contrast are too few for 9 components"):
        fit_mixture(torch.zeros(1, 3, 32, 32), 9, patches=100, iterations=1, seed=0)
