"""A user's own model and a user's own Flower app, audited in ten lines."""

from __future__ import annotations

import pytest
import timm
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from attacks import UsageError
from attacks.linear.image_prior import VectorialVariation
from attacks.mjp.subspace import MJPSubspace
from fedmjp.audit import Watcher, audit_gradient
from fedmjp.federation import TapGrid
from fedmjp.federation.local_grid import LocalGrid
from fedmjp.metrics import psnr
from tests.attacks.models import hugging_face_vit, timm_vit, torchvision_vit
from tests.conftest import observe, photographs


@pytest.mark.parametrize("make", [timm_vit, torchvision_vit, hugging_face_vit])
def test_own_model(make) -> None:
    torch.manual_seed(0)
    model, images = make(), photographs(32, 1)
    head = [p for n, p in model.named_parameters() if n.endswith("weight") and p.dim() == 2][-1]
    torch.nn.init.normal_(head)  # torchvision starts its head at zero, and then nothing reaches the tokens
    output = model(images)
    loss = torch.nn.functional.cross_entropy(getattr(output, "logits", output), torch.tensor([1]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    table = audit_gradient(model, images, gradients).set_index("attack")
    assert table.loc["patch_embedding", "psnr"] > 50
    assert "APRIL's equation does not hold" in table.loc["april", "diagnosis"]


def test_attacks_with_settings_of_their_own(mini) -> None:
    images, prior = photographs(64, 1), VectorialVariation(strength=1.0, iterations=3)
    gradients = observe(mini, images).gradients
    given = ["april", MJPSubspace(prior=prior), MJPSubspace()]
    table = audit_gradient(mini.module, images, gradients, mean=mini.mean, std=mini.std, attacks=given)
    assert list(table["attack"]) == ["april", "mjp_subspace", "mjp_subspace"]
    assert [p["prior"]["strength"] for p in table["attack_parameters"][1:]] == [1.0, 10.0]
    watcher = Watcher(mini.module, image_shape=(3, 64, 64), mean=mini.mean, std=mini.std, attacks=given)
    assert [name for name, _ in watcher.attacks] == list(table["attack"])
    assert watcher.attacks[1][1].prior == prior


def test_own_model_that_is_no_vit() -> None:
    with pytest.raises(UsageError, match="Vision Transformer"):
        audit_gradient(timm.create_model("resnet18"), photographs(32, 1), {})


def test_own_flower_app(tmp_path) -> None:
    """Flower's FedAvg over clients that take one SGD step and return weights: the tap recovers the photograph."""
    torch.manual_seed(0)
    model, image = timm_vit(), photographs(32, 1)
    theirs = ClientApp()

    @theirs.train()
    def train(message: Message, context: Context) -> Message:
        mine = timm_vit()
        mine.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(mine.parameters(), lr=1.0)
        torch.nn.functional.cross_entropy(mine((image - 0.5) / 0.5), torch.tensor([2])).backward()
        optimiser.step()
        content = {"arrays": ArrayRecord(mine.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    grid = LocalGrid(theirs, 2)
    watcher = Watcher(model, image_shape=(3, 32, 32), mean=[0.5] * 3, std=[0.5] * 3, learning_rate=1.0, out=tmp_path)
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(TapGrid(grid, watcher), ArrayRecord(model.state_dict()), num_rounds=1)
    best = [r for _, name, r in watcher.found if name == "patch_embedding"]
    assert len(best) == 2
    assert all(float(psnr(r.images, image)[0]) > 30 for r in best)
    assert len(list(tmp_path.glob("*.png"))) == 4
