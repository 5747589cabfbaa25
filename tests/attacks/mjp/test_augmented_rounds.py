"""Updates of one image in other views: joined exactly where patches stay patches, left out where they do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from attacks import ATTACKS
from attacks.linear.masked_update import solve_masked
from attacks.linear.position_rows import read_position_rows
from attacks.linear.views import mean_colours, places
from attacks.mjp.joined_updates import join_updates, obstacle_to_joining
from attacks.mjp.same_image import Target
from fedmjp.metrics import psnr
from fedmjp.models import build_model
from tests.attacks.mjp.test_mjp_subspace import jigsawed, jigsawed_32
from tests.conftest import photographs

GREY = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]
GAMMA, UPDATES = 0.2, 4


def crop(scene: Tensor, rows: int = 1, columns: int = 1) -> Tensor:
    """(1, 3, 64, 64) of (1, 3, 80, 80), so many patches from the corner."""
    return scene[..., 8 * rows : 8 * rows + 64, 8 * columns : 8 * columns + 64]


def recoloured(image: Tensor, brightness: float, contrast: float, saturation: float) -> Tensor:
    """As torchvision's ColorJitter, without clipping."""
    image = image * brightness
    image = contrast * image + (1 - contrast) * (GREY * image).sum(dim=-3, keepdim=True).mean()
    return saturation * image + (1 - saturation) * (GREY * image).sum(dim=-3, keepdim=True)


VIEWS: dict[str, Sequence[Callable[[Tensor], Tensor]]] = {
    "mirrored": [crop, lambda s: crop(s).flip(-1)],
    "shifted": [crop, lambda s: crop(s, 0, 2), lambda s: crop(s, 2, 1)],
    "shifted and mirrored": [crop, lambda s: crop(s, 0, 1).flip(-1)],
    "recoloured": [crop, lambda s: recoloured(crop(s), 0.8, 1.2, 0.7), lambda s: recoloured(crop(s), 1.1, 0.8, 1.3)],
    "recoloured and mirrored": [crop, lambda s: recoloured(crop(s), 0.8, 1.2, 0.7).flip(-1)],
    "darker and shifted": [crop, lambda s: 0.7 * crop(s, 2, 0)],
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted by a pixel": lambda s: s[..., 9:73, 8:72],
    "resized": lambda s: torch.nn.functional.interpolate(s, 72, mode="bilinear")[..., 4:68, 4:68],
    "gamma": lambda s: crop(s) ** 1.5,
}


@pytest.fixture(scope="module")
def scene() -> Tensor:
    return photographs(80, 3)[2:].double()


def updates(models, views: Sequence[Tensor]) -> list:
    return [jigsawed(m, v, GAMMA, seed=i) for i, (m, v) in enumerate(zip(models, views, strict=True))]


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_joined_and_agree_with_equations_that_know_them(models, scene, name: str) -> None:
    changes = VIEWS[name]
    sent = updates(models, [changes[(t + 1) % len(changes)](scene) for t in range(UPDATES - 1)] + [crop(scene)])
    joined = join_updates(sent)
    assert joined.equations.updates == UPDATES
    assert joined.changed == sum((t + 1) % len(changes) != 0 for t in range(UPDATES - 1))
    # The oracle is given the image: it fulfils every equation that was added.
    x = joined.tokenizer.patchify(models[0].normalise(crop(scene)))[0]
    assert float(joined.equations.misfit(x).sum() / joined.equations.squares.sum()) < 1e-9
    found = ATTACKS.get("mjp_rounds")()(sent)
    assert found.details["changed"] == joined.changed
    assert float(psnr(found.images, crop(scene).float().clamp(0, 1))) > (60 if "shifted" not in name else 30)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_linear_on_patches_is_left_out(models, scene, name: str) -> None:
    sent = updates(models, [OTHERS[name](scene)] * (UPDATES - 1) + [crop(scene)])
    found = ATTACKS.get("mjp_rounds")()(sent)
    assert found.details["updates"] == 1
    assert "no earlier update of this client shows the image of the last one" in obstacle_to_joining(sent, "x")


def test_other_photographs_in_every_view_are_left_out(models, scene) -> None:
    other = photographs(80, 2).double()
    sent = updates(models, [crop(other[:1]).flip(-1), crop(other[1:], 0, 2), 0.8 * crop(other[:1]), crop(scene)])
    assert ATTACKS.get("mjp_rounds")()(sent).details["updates"] == 1


def test_uniform_areas_move_no_update(models, scene) -> None:
    """Where masks leave hardly more than a uniform area to compare, shifts agree on it as well as no shift."""
    image = crop(scene).clone()
    image[..., :40, :] = 0.7
    views = [jigsawed(models[0], image, 0.5, seed=seed) for seed in range(12)]
    found = ATTACKS.get("mjp_rounds")()(views)
    assert (found.details["updates"], found.details["changed"]) == (12, 0)


def test_uniform_areas_move_no_update_in_float32_either(scene) -> None:
    """Round-off then leaves more between unmoved views of such an area than some shift does by chance."""
    model, image = build_model("vit_mini_64_mjp", num_classes=8, weights="random"), crop(scene).float()
    image[..., :40, :] = 0.98
    joined = join_updates([jigsawed(model, image, 0.8, seed=seed) for seed in range(16)])
    assert (joined.equations.updates, joined.changed) == (16, 0)
    x = joined.tokenizer.patchify(model.normalise(image))[0].double()
    assert float(joined.equations.misfit(x).sum() / joined.equations.squares.sum()) < 1e-4


def test_updates_that_share_hardly_a_place_are_not_shifted(models, scene) -> None:
    """At gamma 0.9 two updates often show no place both; every shift then compares a few places at random."""
    views = [jigsawed(models[0], crop(scene), 0.9, seed=seed) for seed in range(12)]
    joined = join_updates(views)
    assert (joined.equations.updates, joined.changed) == (12, 0)
    x = joined.tokenizer.patchify(models[0].normalise(crop(scene)))[0]
    assert float(joined.equations.misfit(x).sum() / joined.equations.squares.sum()) < 1e-9


def test_colours_and_shift_are_those_that_were_applied(models, scene) -> None:
    image, changed = crop(scene), 0.7 * crop(scene, 2, 0) + 0.1
    ours, theirs = (read_position_rows(v) for v in updates(models[:2], [image, changed]))
    view = Target.of(ours, solve_masked(ours)).view_of(theirs, solve_masked(theirs))
    assert torch.equal(view.source, places((8, 8), False, (-1, 1)))
    torch.testing.assert_close(view.mix, torch.eye(3, dtype=torch.float64) / 0.7, atol=1e-5, rtol=0)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (models[0].mean, models[0].std))
    # x = (y - 0.1) / 0.7 in pixels, both normalised.
    torch.testing.assert_close(view.offset, ((mean - 0.1) / 0.7 - mean) / std, atol=1e-4, rtol=0)
    colours = mean_colours(ours.tokenizer)
    torch.testing.assert_close(colours @ colours.T, torch.eye(3, dtype=torch.float64))


def test_shown_patches_alone_tell_images_apart_where_row_spaces_cannot() -> None:
    """32 pixels: a patch has 48 values, and 64 of them span everything."""
    model = build_model("vit_mini_32_mjp", num_classes=8, weights="random")
    same = jigsawed_32(model, gamma=0.2)
    other = jigsawed(model, photographs(32, 2)[1:], 0.2, seed=1)
    turned = jigsawed(model, photographs(32, 1).flip(-1), 0.2, seed=2)
    found = ATTACKS.get("mjp_rounds")()([other, turned, same])
    assert (found.details["updates"], found.details["changed"], found.diagnosis) == (2, 1, "")
