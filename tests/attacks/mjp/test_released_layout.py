"""The authors' released layout (one table of N + 2 rows) is read as ours is: masks, shared embedding, localisation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attacks import ATTACKS, Observation, Reconstruction
from attacks.certificate import certify
from attacks.linear.position_rows import read_position_rows
from attacks.memory import remember
from attacks.tokenizer import find_tokenizer
from fedmjp.metrics import psnr
from tests.attacks.models import ReleasedMJP
from tests.conftest import photographs


def update(hidden: int, dal: float = 0.0) -> tuple[Observation, torch.Tensor, torch.Tensor]:
    """One client's update with the first `hidden` of 16 positions masked, its mask and its photograph."""
    torch.manual_seed(0)
    model, image = ReleasedMJP(localised=dal > 0), photographs(32, 1)
    mask = torch.arange(16) < hidden
    tokens = functional.pad(mask.long()[None], (1, 0))
    loss = functional.cross_entropy(model((image - 0.5) / 0.5, tokens if hidden else None).sup, torch.tensor([2]))
    if dal:
        loss = loss + dal * model.localisation_loss(mask)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    return Observation(gradients, model, 1, (3, 32, 32), (0.5,) * 3, (0.5,) * 3), mask, image


@pytest.mark.parametrize(("hidden", "dal"), [(0, 0.0), (5, 0.0), (0, 0.1), (5, 0.1)])
def test_rows_mask_and_localisation_are_read(hidden: int, dal: float) -> None:
    view, mask, _ = update(hidden, dal)
    rows = read_position_rows(view)
    assert torch.equal(rows.masked, mask)
    assert rows.imbalance < 1e-5
    assert rows.dal_weight == pytest.approx(dal, rel=1e-3)
    assert torch.equal(read_position_rows(remember(view)).rows, rows.rows)


@pytest.mark.parametrize("name", ["patch_embedding", "mjp_subspace", "unmix", "batch_rounds"])
def test_an_undefended_step_is_recovered(name: str) -> None:
    view, _, image = update(0)
    found = ATTACKS.get(name)()([view])
    assert found.diagnosis == ""
    assert psnr(found.images, image)[0] > 60


@pytest.mark.parametrize("dal", [0.0, 0.1])
def test_masked_positions_are_named_or_worked_around(dal: float) -> None:
    view, _, image = update(3, dal)
    naive = ATTACKS.get("patch_embedding")()([view])
    assert "3 of 16 position rows are exactly zero" in naive.diagnosis
    aware = ATTACKS.get("mjp_subspace")()([view])
    assert aware.diagnosis == ""
    assert psnr(aware.images, image)[0] > psnr(naive.images, image)[0] + 5


def test_the_step_is_reproduced_with_its_mask() -> None:
    view, _, image = update(5)
    assert certify(view, Reconstruction(image))[0]
    assert not certify(view, Reconstruction(1 - image))[0]


def test_gradient_matching_masks_the_same_positions() -> None:
    from attacks.gradient_matching.matched_update import extract_matched_update
    from attacks.gradient_matching.simulation import build_simulation

    view, mask, image = update(5, 0.1)
    matched = extract_matched_update(view)
    assert torch.equal(matched.mask, mask)
    simulation, target = build_simulation(view, [matched], 1, exact=True)
    found = simulation.gradients(((image - 0.5) / 0.5)[None], torch.tensor([[2]]))
    assert "pos_embed.weight" in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, target.values[name], atol=1e-5, rtol=1e-3)
    assert find_tokenizer(view.model, (3, 32, 32)).localisation == "dlocr"
