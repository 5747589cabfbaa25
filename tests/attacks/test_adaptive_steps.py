"""The first step of Adam is turned back into a gradient with true bounds; the oracle is PyTorch's own optimiser."""

from __future__ import annotations

import copy
import dataclasses
from itertools import starmap

import pytest
import torch

from attacks import ATTACKS, Observation
from attacks.adaptive_steps import undo_first_step
from attacks.linear.intervals import error_bounds
from attacks.registry import UsageError
from fedmjp.metrics import psnr
from fedmjp.models import BuiltModel, build_model
from tests.conftest import observe, photographs

RATE = 1e-3


@pytest.fixture(scope="module")
def trained() -> BuiltModel:
    return build_model("vit_mini_64", num_classes=8, weights="auto")


def stepped(
    model: BuiltModel, image: torch.Tensor, epsilon: float, kind: type = torch.optim.AdamW, steps: int = 1, **options
) -> tuple[Observation, dict[str, torch.Tensor]]:
    """Returned weights as the server turns them into an update, and the gradient of the last step."""
    view, after = observe(model, image), copy.deepcopy(model.module)
    optimiser = kind(after.parameters(), lr=RATE, eps=epsilon, **options)
    for step in range(steps):
        before = {n: p.detach().clone() for n, p in after.named_parameters()}
        last = observe(dataclasses.replace(model, module=after), image.roll(step, -1)).gradients
        for name, parameter in after.named_parameters():
            parameter.grad = last[name].clone()
        optimiser.step()
    moved = {n: ((before[n] - p) / RATE).detach() for n, p in after.named_parameters()}
    return dataclasses.replace(view, gradients=moved, kind="weights", learning_rate=RATE), last


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-6])
def test_every_entry_lies_within_its_bounds(trained, kind: type, epsilon: float) -> None:
    sent, true = stepped(trained, photographs(64, 1), epsilon, kind, weight_decay=0.0)
    undone = undo_first_step(sent, epsilon)
    for name in ("pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"):
        low = undone.gradients[name].double().abs() - error_bounds(undone, name)
        assert bool((undone.gradients[name].sign() * true[name] >= 0).all())
        assert bool((true[name].abs() >= 0.99 * low - 1e-12).all())
        bounded = (true[name] - undone.gradients[name]).double().abs() <= 1.01 * error_bounds(undone, name) + 1e-12
        assert float(bounded.double().mean()) > 0.7  # the others are larger than REACH times what is known of them
        known = error_bounds(undone, name) < 0.1 * undone.gradients[name].abs()
        off = (undone.gradients[name] / true[name] - 1).abs()[known]
        assert known.any()
        assert float(off.max()) < 0.12


@pytest.mark.long
def test_a_larger_epsilon_leaves_more_of_the_picture(trained) -> None:
    image, attack = photographs(64, 1), ATTACKS.get("patch_embedding")()
    values = {}
    for epsilon in (1e-8, 1e-6):
        sent, _ = stepped(trained, image, epsilon, weight_decay=0.0)
        answers = [attack([sent]), attack([undo_first_step(sent, epsilon)])]
        values[epsilon] = list(starmap(psnr, ((found.images, image) for found in answers)))
        assert epsilon > 1e-8 or not any(found.known.any() for found in answers)
    (plain, undone), (_, better) = values.values()
    assert float(undone) > float(plain) + 4
    assert float(better) > 25
    error = (answers[1].images - image).square().mean(dim=1)[answers[1].known[:, 0]]  # of the last: what it vouches for
    assert len(error)
    assert float(error.mean()) < 10**-4


def test_zeros_stay_zeros() -> None:
    model = build_model("vit_mini_64_mjp", num_classes=8, weights="random", dal="none")
    view = observe(model, photographs(64, 1), mask=(torch.arange(64) < 9)[None])
    steps = {n: g / (g.abs() + 1e-8) for n, g in view.gradients.items()}
    undone = undo_first_step(dataclasses.replace(view, gradients=steps, kind="weights", learning_rate=RATE), 1e-8)
    rows = undone.gradients["pos_embed"][0, 1:]
    assert torch.equal((rows == 0).all(dim=1), torch.arange(64) < 9)


def test_what_is_no_first_step_is_refused(trained) -> None:
    later, _ = stepped(trained, photographs(64, 1), 1e-8, steps=3)
    with pytest.raises(UsageError, match="of the weights moved by more than the learning rate"):
        undo_first_step(later, 1e-8)
    sgd = dataclasses.replace(observe(trained, photographs(64, 1)), kind="weights", learning_rate=RATE)
    for wrong in (dataclasses.replace(sgd, kind="gradient"), dataclasses.replace(sgd, local_steps=2)):
        with pytest.raises(UsageError, match="after one local step at a known"):
            undo_first_step(wrong, 1e-8)
