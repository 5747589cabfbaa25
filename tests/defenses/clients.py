"""One client's update on a photograph under a defence, as the server of a federation sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch import Tensor

from attacks import ATTACKS, Observation, Reconstruction
from fedmjp.audit.harness import answer
from fedmjp.audit.observe import SentModels, observe_update
from fedmjp.client import ClientTask
from fedmjp.config import DataConfig, ModelConfig, RunConfig
from fedmjp.federation_options import FederationConfig, LocalConfig


@dataclass(frozen=True)
class Update:
    """What one client fed and sent.

    Attributes:
        task: the client's.
        original, seen: (B, C, H, W) in [0, 1], before and after the defence on the input.
        view: the update.
    """

    task: ClientTask
    original: Tensor
    seen: Tensor
    view: Observation

    def attacked(self, name: str) -> Reconstruction:
        """The answer of the attack of that name, certified where it can be."""
        return answer(ATTACKS.get(name)(), [self.view], weights_granted=True)


def task_under(
    defense: str,
    model: str = "vit_mini_64",
    batch_size: int = 1,
    weights: str = "auto",
    update: Literal["gradient", "weights"] = "gradient",
    **local,
) -> ClientTask:
    """The task of a federation of two clients on photographs.

    Args:
        defense: entry of --defense.
        weights: as for --weights; by default the shipped ones where there are any.
        update: what clients send.
        local: fields of `LocalConfig`.
    """
    config = RunConfig(
        defense=(defense,),
        federation=FederationConfig(clients=2, rounds=1, batch_size=batch_size, update=update),
        local=LocalConfig(**local),
        model=ModelConfig(model, weights),
        data=DataConfig(train_limit=8, test_limit=2),
    )
    config.validate()
    return ClientTask(config, defense)


def weights_of(task: ClientTask) -> dict[str, Tensor]:
    """A copy of the weights that a server sends before the first round."""
    return {name: tensor.detach().clone() for name, tensor in (task.parameters | task.buffers).items()}


@lru_cache
def update_under(defense: str, model: str = "vit_mini_64", batch_size: int = 1, **local) -> Update:
    """The first client's update in the first round; arguments as for `task_under`."""
    task = task_under(defense, model, batch_size, **local)
    sent, batch = weights_of(task), task.batch(0, 1, 0)
    view = observe_update(
        task,
        task.config.threat_model(),
        model=SentModels(task.model.module)(sent),
        round=1,
        client=0,
        sent=sent,
        received=task.update(0, 1, sent).tensors,
    )
    return Update(task, batch.images, task.seen(batch, 0, 1, 0).images, view)
