"""Situations of a `Watcher` in a Flower app: what the clients do, and what it is given about them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.situations import models
from experiments.situations.answers import CRASHED, Answer, of_watcher
from experiments.situations.gradients import HALF, normalise, photographs

GIVEN = {"learning_rate": 0.1, "batch_size": 1, "local_steps": 1}  # what the Watcher is given, unless said otherwise


def trained(
    state: Mapping[str, Tensor],
    images: Tensor,
    make_optimiser: Callable = torch.optim.SGD,
    steps: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """A client's weights after `steps` steps on `images`, (B, 3, 32, 32) in [0, 1]."""
    model = models.timm_vit()
    model.load_state_dict(state)
    optimiser = make_optimiser(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(steps):
        optimiser.zero_grad()
        cross_entropy(model(normalise(images)), torch.arange(len(images)) % models.CLASSES).backward()
        optimiser.step()
    return model.state_dict()


def watched(
    images: int = 1,
    reply: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    given: Mapping[str, Any] = GIVEN,
    **client: Any,
) -> Callable[[], Answer]:
    """One round of Flower's FedAvg with two clients under a `Watcher`, as a function without arguments.

    Args:
        images: batch size of the clients.
        reply: from a client's weights to those that it sends.
        given: what the `Watcher` is given about the clients.
        client: how they train, see `trained`.
    """

    def ask() -> Answer:
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.serverapp.strategy import FedAvg

        from fedmjp.audit import Watcher
        from fedmjp.federation import TapGrid
        from fedmjp.federation.local_grid import LocalGrid

        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            node = int(context.node_config["partition-id"])
            batch = photographs(*range(images * node, images * (node + 1)))
            weights = reply(trained(message.content["arrays"].to_torch_state_dict(), batch, **client))
            content = {"arrays": ArrayRecord(weights), "metrics": MetricRecord({"num-examples": images})}
            return Message(RecordDict(content), reply_to=message)

        torch.manual_seed(0)
        model = models.timm_vit()
        with tempfile.TemporaryDirectory() as folder:
            watcher = Watcher(model, image_shape=(3, 32, 32), mean=HALF, std=HALF, out=Path(folder) / "leaks", **given)
            grid = TapGrid(LocalGrid(app, 2), watcher)
            try:
                FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
            except Exception as error:  # whatever it is, the app's training is lost
                return Answer(CRASHED, f"the app's training ends with {type(error).__name__}: {error}")
            return of_watcher(watcher)

    return ask


def less(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the position embedding."""
    return {name: value for name, value in state.items() if name != "pos_embed"}


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In half precision."""
    return {name: value.half() for name, value in state.items()}


ADAM = {"make_optimiser": torch.optim.Adam, "lr": 1e-3}
FLOWER: dict[str, tuple[str, Callable[[], Answer]]] = {
    "fedavg": ("a Flower app: one step of SGD, everything given", watched()),
    "no_learning_rate": ("the learning rate is not given", watched(given={"batch_size": 1, "local_steps": 1})),
    "wrong_learning_rate": ("a learning rate ten times too small is given",
                            watched(given=GIVEN | {"learning_rate": 0.01})),
    "adam_clients": ("the clients use Adam, and nobody says so",
                     watched(given=GIVEN | {"learning_rate": 1e-3}, **ADAM)),
    "decaying_clients": ("the clients use weight decay, and nobody says so", watched(weight_decay=0.05)),
    "unsaid_steps": ("the clients take two steps, and nobody says so", watched(steps=2)),
    "unsaid_batch": ("the clients have batches of eight, and nobody says so", watched(images=8)),
    "partial_reply": ("the reply lacks the position embedding", watched(reply=less)),
    "half_reply": ("the clients send their weights in half precision", watched(reply=halved)),
}  # fmt: skip
