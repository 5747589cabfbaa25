"""Fishing through several local steps: who sends after the first, and what comes back of returned weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks import ATTACKS, Observation, UsageError
from attacks.active.held import find_end
from fedmjp.audit.observe import model_as_sent
from fedmjp.models import BuiltModel, build_model
from tests.attacks.active.contexts import before
from tests.attacks.contract import psnr
from tests.attacks.models import timm_vit, torchvision_vit
from tests.conftest import photographs

SHAPE = (3, 32, 32)
LABELS = torch.tensor([3, 0, 5, 6])
RECIPES: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "sgd": (torch.optim.SGD, 0.01),
    "adamw": (torch.optim.AdamW, 0.001),  # with torch's weight decay of 0.01
}


@pytest.fixture(scope="module")
def built() -> BuiltModel:
    return build_model("vit_mini_32", num_classes=10, weights="auto")


def trained(
    built: BuiltModel, sent: nn.Module, batches: list[tuple[Tensor, Tensor]], recipe: str, rate: float = 0.0
) -> tuple[Observation, nn.Module]:
    """What a client returns after a step on each batch, as the server sees it, and its model before the last step."""
    make, usual = RECIPES[recipe]
    module, rate = copy.deepcopy(sent), rate or usual
    optimiser = make(module.parameters(), lr=rate)
    for images, labels in batches:
        before = copy.deepcopy(module)
        optimiser.zero_grad()
        functional.cross_entropy(module(built.normalise(images)), labels).backward()
        optimiser.step()
    after = dict(module.named_parameters())
    view = Observation(
        {name: ((value - after[name]) / rate).detach() for name, value in sent.named_parameters()},
        sent,
        num_examples=len(batches[0][0]),
        image_shape=SHAPE,
        mean=tuple(built.mean),
        std=tuple(built.std),
        kind="weights",
        local_steps=len(batches),
        learning_rate=rate,
    )
    return view, before


def fished(built: BuiltModel, recipe: str, target: int = 5, steps: str | None = None) -> tuple:
    """The attack, and the model that it sends."""
    attack = ATTACKS.get("fishing")(target=target, local_steps=steps or recipe)
    return attack, model_as_sent(built.module, attack.send(before(built.module, SHAPE)).parameters)


@pytest.mark.parametrize("recipe", ["sgd", "adamw"])
def test_other_classes_send_nothing_after_the_first_step_either(built, recipe: str) -> None:
    images = photographs(32, 4)
    _, sent = fished(built, recipe)
    _, module = trained(built, sent, [(images, LABELS)] * 3, recipe)
    assert not torch.equal(module.pos_embed, sent.pos_embed)
    below = [p for n, p in module.named_parameters() if not n.startswith("head.")]
    for index, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        loss = functional.cross_entropy(module(built.normalise(image[None])), label[None])
        largest = max(float(g.abs().max()) for g in torch.autograd.grad(loss, below))
        assert (largest > 0) == (index == 2)


@pytest.mark.parametrize("recipe", ["sgd", "adamw"])
def test_two_local_epochs_in_minibatches_give_the_image(built, recipe: str) -> None:
    images = photographs(32, 4)
    batches = list(zip(images.split(2), LABELS.split(2), strict=True)) * 2
    attack, sent = fished(built, recipe)
    found = attack([trained(built, sent, batches, recipe)[0]])
    assert found.diagnosis == ""
    assert found.known.all()
    assert psnr(found, images[2:3]) > 60
    assert found.details["classes"] == (3 if recipe == "adamw" else 4)  # AdamW does not show the anchor's class, 6
    _, zeros = fished(built, recipe, steps="one")  # the classifier of one step, whose rows move
    assert psnr(ATTACKS.get("fishing")(target=5)([trained(built, zeros, batches, recipe)[0]]), images[2:3]) < 30


def test_labels_are_counted_over_all_steps(built) -> None:
    attack, sent = fished(built, "sgd", target=3)
    view, _ = trained(built, sent, [(photographs(32, 4), torch.tensor([3, 0, 5, 3]))] * 2, "sgd")
    found = attack([view])
    assert (found.details["senders"], found.details["classes"]) == (4, 3)
    assert "4 images of class 3 send their gradients together" in found.diagnosis


@pytest.mark.parametrize("recipe", ["sgd", "adamw"])
def test_a_class_that_no_one_holds_sends_nothing(built, recipe: str) -> None:
    attack, sent = fished(built, recipe, target=9)
    found = attack([trained(built, sent, [(photographs(32, 4), LABELS)] * 2, recipe)[0]])
    assert found.images is None
    assert found.diagnosis.startswith("no image of class 9 is in the batch")


def test_rows_that_move_are_noticed(built) -> None:
    attack, sent = fished(built, "sgd")
    found = attack([trained(built, sent, [(photographs(32, 4), LABELS)] * 2, "sgd", rate=1e7)[0]])
    assert "did not stay equal through the local steps" in found.diagnosis
    assert found.known is None or not found.known.any()


@pytest.mark.parametrize(
    ("make", "norm", "last"),
    [
        (timm_vit, "norm", "blocks.1.mlp.fc2"),
        (torchvision_vit, "encoder.ln", "encoder.layers.encoder_layer_1.mlp.3"),
    ],
)
def test_the_last_layers_are_found_in_other_libraries(make, norm: str, last: str) -> None:
    model = make().eval()
    layer = next(n for n, m in reversed(list(model.named_modules())) if isinstance(m, nn.Linear))
    end = find_end(model, SHAPE, layer)
    assert (end.norm, end.last) == (norm, last)


def test_a_classifier_behind_something_else_than_a_norm_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(3072, 8), nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.fc(images.flatten(1)))

    with pytest.raises(UsageError, match="reads no LayerNorm's output"):
        find_end(Bare(), SHAPE, "head")
